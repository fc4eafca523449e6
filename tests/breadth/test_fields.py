"""No field of Megatron's TransformerConfig passes unseen: it is in a row of the table, or there is a reason."""

import pytest

from tests.breadth.fields import BY_REASON, NOT_IN_THE_TABLE
from tests.breadth.settings import SETTINGS

IN_THE_TABLE = {name for setting in SETTINGS for name in setting.config}


@pytest.fixture(scope="module")
def fields_at_hand(distributed_pool):
    return distributed_pool(1).submit("tests.breadth.jobs:config_fields")[0]


def test_every_field_is_known(fields_at_hand):
    """A new one: look what it means for the dispatcher, then add a row to settings.py or a reason to fields.py."""
    known, _ = fields_at_hand
    assert len(known) > 200
    assert set(known) - IN_THE_TABLE - set(NOT_IN_THE_TABLE) == set()


def test_what_the_stock_dispatcher_reads_is_not_called_elsewhere(fields_at_hand):
    _, read = fields_at_hand
    elsewhere = {name for why, names in BY_REASON.items() if why.startswith("elsewhere") for name in names.split()}
    assert len(read) > 5
    assert set(read) & elsewhere == set()


def test_there_is_one_reason_each():
    assert len(NOT_IN_THE_TABLE) == len(set(NOT_IN_THE_TABLE))
    assert IN_THE_TABLE.isdisjoint(NOT_IN_THE_TABLE)
