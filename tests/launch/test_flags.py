"""Checking flags against a parser; the real one of Megatron is used in test_models.py and test_command.py."""

import pytest

from megatron_ascend_moe.launch import flags


@pytest.fixture
def parser():
    parser = flags._RaisingParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=["a", "b"])
    return parser


def test_known_flags_are_parsed(parser):
    args = flags.check_flags({"num-layers": 2, "swiglu": True, "kinds": ["a", "b"], "torchrun": {"x": 1}}, parser)
    assert (args.num_layers, args.swiglu, args.kinds) == (2, True, ["a", "b"])


def test_unknown_flag_names_the_nearest(parser):
    with pytest.raises(ValueError, match="'num-layer' is not a flag of this Megatron; did you mean 'num-layers'"):
        flags.check_flags({"num-layer": 2}, parser)


def test_every_problem_is_reported_at_once(parser):
    with pytest.raises(ValueError) as error:
        flags.check_flags({"swiglu": "yes", "num-layers": True, "nonsense": 1}, parser)
    assert str(error.value).splitlines() == [
        "'swiglu' is a switch, got the value 'yes': write `swiglu: true`",
        "'num-layers' needs a value, got none",
        "'nonsense' is not a flag of this Megatron",
    ]


def test_values_that_the_parser_refuses_raise(parser):
    with pytest.raises(ValueError, match="Megatron's parser refuses.*invalid choice: 'c'"):
        flags.check_flags({"kinds": ["c"]}, parser)
    with pytest.raises(ValueError, match="invalid int value"):
        flags.check_flags({"num-layers": "two"}, parser)


def test_without_megatron_training_the_reason_is_told(monkeypatch):
    find_spec = flags.importlib.util.find_spec
    monkeypatch.setattr(
        flags.importlib.util, "find_spec", lambda name: None if name.startswith("megatron.t") else find_spec(name)
    )
    with pytest.raises(flags.NoMegatronParser, match="megatron.training is not installed here"):
        flags.megatron_parser()
