"""Events are methods of a subclass; each gets one context."""


class Callback:
    def on_train_start(self, context) -> None:
        """Before the first step; context.model is the list of model chunks."""
