"""`pretrain` builds a model, fires the callbacks of the start, and trains nothing."""

from types import SimpleNamespace


def pretrain(config, forward_step_func, callbacks=None) -> None:
    from bridge_install import build_model  # the example's, for a model of any size

    if not callable(forward_step_func):
        raise TypeError(f"forward_step_func: expected a function, got {forward_step_func!r}")
    print("model settings:", vars(config.model))
    model = build_model()
    for callback in callbacks or ():
        callback.on_train_start(SimpleNamespace(model=[model]))
