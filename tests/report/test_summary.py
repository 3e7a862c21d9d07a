"""What a run says when it ends, and which scores may depend on later units."""

import pytest

from rtx.compose import compose
from rtx.report.summary import closing_lines, protocol_line, sees_future


def test_the_closing_lines_fit_a_narrow_terminal() -> None:
    run = "outputs/rtx/20260101-120000-abcd"
    protocol = protocol_line(compose(["routing=topk"]), "valid", "byte", 628_118, partial=True, ablate="local")
    assert "628,118 bytes each scored once (a sample of the windows), windows of 256, stride 256" in protocol
    final = {"bits": 2.5, "unit": "byte", "baselines": {"order-2 bytes": 2.75, "zlib": 1.93}}
    said = closing_lines(run, "1,000 steps (trainer.max_minutes is up)", final, protocol)
    assert max(map(len, said.splitlines())) < 80
    assert said.splitlines()[-2:] == [f"next: rtx eval {run} split=test", f"      rtx sample {run}"]


@pytest.mark.parametrize(
    ("overrides", "sees"),
    [
        ([], False),
        (["routing=topk"], True),
        (["model.base=lsh"], False),
        (["model.base=lsh", "model.lsh=reformer"], True),
        (["model.base=local+lsh", "model.lsh=reformer", "routing.heads=0"], True),
        (["model.base=lsh", "model.lsh=reformer", "routing.heads=4", "routing.layers=4"], False),
    ],
)
def test_who_sees_the_future(overrides: list[str], sees: bool) -> None:
    config = compose(overrides)
    assert sees_future(config, "parallel") is sees
    assert not sees_future(config, "streaming")
    line = protocol_line(config, "test", "byte", 1000)
    assert ("sees no future" in line) is not sees
    assert ("lsh=" in line) is ("lsh" in config.model.base and config.routing.heads < config.model.heads)
