"""Which scores may depend on later units."""

from __future__ import annotations

import pytest

from rtx.compose import compose
from rtx.report.summary import protocol_line, sees_future


@pytest.mark.parametrize(
    ("overrides", "sees"),
    [
        ([], False),
        (["routing=topk"], True),
        (["model.base=lsh"], False),
        (["model.base=lsh", "model.lsh=reformer"], True),
        (["model.base=local+lsh", "model.lsh=reformer", "routing.heads=0"], True),
        (["model.base=lsh", "model.lsh=reformer", "routing.heads=4", "routing.layers=4"], False),
        (["model.lsh=reformer"], False),
    ],
)
def test_who_sees_the_future(overrides: list[str], sees: bool) -> None:
    config = compose(overrides)
    assert sees_future(config, "parallel") is sees
    assert not sees_future(config, "streaming")
    line = protocol_line(config, "test", "byte", 1000)
    assert ("sees no future" in line) is not sees
    assert ("lsh=" in line) is ("lsh" in config.model.base and config.routing.heads < config.model.heads)
