"""What a report says first: a headline of at most twenty words, and a line for each rival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rtx.errors import plural
from rtx.report.curves import BUDGETS, TOO_EARLY, Finding
from rtx.report.ranking import FEW, SEEDS, Comparison, mean
from rtx.report.score_tables import Kinds
from rtx.report.tables import MINUS
from rtx.report.times import Against, duration, ratio_span

FULL = {"full": "full attention", "local+full": "local+full attention"}

ALREADY = "already at a first validation, no time known"


@dataclass(frozen=True)
class Answer:
    """The first sentence, and the lines below it."""

    headline: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Duel:
    """A contender against a rival.

    `loss`: the lowest loss that all its seeds have reached, and `time` the finding there, None where there is none.
    `missed`: the next lower loss, or the highest where none is reached; `why`: why there is no time to it.
    """

    contender: str
    rival: str
    unit: str
    score: Comparison | None
    loss: float | None = None
    time: Finding | None = None
    missed: float | None = None
    why: str = ""
    gap: Finding | None = None
    seconds: float = 0.0

    @property
    def has_verdict(self) -> bool:
        return self.score is not None and self.score.difference is not None

    @property
    def time_verdict(self) -> str:
        return self.time.comparison.verdict if self.time else FEW

    @property
    def falls_behind(self) -> bool:
        """Whether the contender is behind at the end of the equal time, or of all its steps."""
        at_end = self.gap.comparison.verdict if self.gap else FEW
        return "behind" in (at_end, self.score.verdict if self.score else FEW)


def attention(kind: str) -> str:
    """Return a kind of heads as the subject of a sentence."""
    return FULL.get(kind, kind)


def answer(kinds: Kinds, found: Sequence[Against]) -> Answer:
    """Return what may be concluded of the kinds of heads."""
    contender = contender_of(kinds, found)
    duels = duels_of(contender, kinds, found) if contender else []
    lines = [line_of(duel) for duel in duels] if kinds.most_seeds > 1 else []
    return Answer(headline(kinds, contender, duels), [*lines, *further_lines(kinds)])


def contender_of(kinds: Kinds, found: Sequence[Against]) -> str:
    """Return the kind that the headline is about; empty where there is none beside the rivals.

    Of the kinds that are no rivals, with five seeds if any have them, it is the one that beats the first rival in time;
    of several, or of none, the one that reaches its lowest loss, then that in the least time; without times the one of
    the lowest mean.
    """
    able = [kind for kind in kinds.order if kind in kinds.legal and kind not in kinds.against]
    able = able or list(kinds.against[1:])
    able = [kind for kind in able if len(kinds.legal[kind]) >= SEEDS] or able
    first = kinds.against[0] if kinds.against else ""
    duels = [duel_of(kind, first, kinds, found) for kind in able]
    return min(duels, key=preference).contender if duels else ""


def preference(duel: Duel) -> tuple[bool, float, float]:
    """Return what makes one contender come before another: the least first."""
    ratio = duel.time.middle if duel.time and duel.time.middle is not None else math.inf
    wins = duel.time_verdict == "better"
    return not wins, math.inf if duel.loss is None else duel.loss, ratio


def duels_of(contender: str, kinds: Kinds, found: Sequence[Against]) -> list[Duel]:
    """Return the contender against each rival that comes before it."""
    rivals = list(kinds.against)
    if contender in rivals:
        rivals = rivals[: rivals.index(contender)]
    return [duel_of(contender, rival, kinds, found) for rival in rivals]


def duel_of(kind: str, rival: str, kinds: Kinds, found: Sequence[Against]) -> Duel:
    """Return what is known of a kind against a rival."""
    score = kinds.compared.get((kind, rival))
    one = next((one for one in found if one.rival == rival), None)
    if one is None or kind not in one.seconds:
        return Duel(kind, rival, kinds.unit, score, why="not compared")
    reached = [loss for loss in one.losses if one.times[kind, loss].middle is not None]
    loss = min(reached, default=None)
    missed = max((other for other in one.losses if loss is None or other < loss), default=None)
    return Duel(
        *(kind, rival, kinds.unit, score, loss),
        time=None if loss is None else one.times[kind, loss],
        missed=missed,
        why="" if missed is None else one.times[kind, missed].why,
        gap=one.gaps[kind, BUDGETS[-1]],
        seconds=one.seconds[kind],
    )


def headline(kinds: Kinds, contender: str, duels: Sequence[Duel]) -> str:
    """Return the first sentence, of at most twenty words."""
    if kinds.most_seeds == 1:
        return "Not certain: 1 seed a row; no verdict."
    if len(kinds.legal) < 2:
        return "Nothing to compare: one kind of heads has a score that sees no future."
    if not any(kinds.legal.values()):
        return "Not certain: of several rows of a kind one is chosen, and no seeds are left to report it by."
    judged = [duel for duel in duels if duel.has_verdict]
    if judged:
        return verdict_on(judged[0])
    lowest = min(kinds.legal, key=lambda kind: mean(kinds.legal[kind].values()) if kinds.legal[kind] else math.inf)
    counts = sorted({len(values) for values in kinds.legal.values() if values})
    here = " to ".join(str(count) for count in dict.fromkeys([counts[0], counts[-1]]))
    return f"Not certain: {lowest} heads have the lowest mean, but a verdict takes {SEEDS} seeds; here {here}."


def verdict_on(duel: Duel) -> str:
    """Return who is ahead: by the time to the lowest loss that both reach, or without times by the closing scores."""
    own = duel.contender
    rival = attention(duel.rival)
    if duel.time is None or duel.time_verdict == FEW:
        return verdict_by_score(duel)
    span = ratio_span(duel.time)
    if duel.time_verdict == "behind":
        return f"{upper(rival)} is ahead: {own} takes {span} of its time to {duel.loss:.2f} bits."
    but = ", but ends behind" if duel.falls_behind else ""
    if duel.time_verdict == "better":
        return f"{upper(own)} reaches {duel.loss:.2f} bits in {span} of {genitive(rival)} time{but}."
    if duel.falls_behind:
        return f"{upper(rival)} ends ahead; to {duel.loss:.2f} bits {own} takes {span} of its time."
    if duel.score and duel.score.verdict == "better":
        apart = f"{abs(duel.score.difference or 0.0):.3f} ± {duel.score.half:.3f} bits"
        return f"{upper(own)} ends {apart} ahead of {rival}; no difference in time to {duel.loss:.2f} bits shown."
    return f"No difference in time shown: {own} reaches {duel.loss:.2f} bits in {span} of {genitive(rival)} time."


def verdict_by_score(duel: Duel) -> str:
    """Return who is ahead by the closing scores."""
    assert duel.score is not None and duel.score.difference is not None
    apart = f"{abs(duel.score.difference):.3f} ± {duel.score.half:.3f} {duel.unit}"
    rival = attention(duel.rival)
    if duel.score.verdict == "better":
        return f"{upper(duel.contender)} is ahead of {rival} by {apart} in the closing score."
    if duel.score.verdict == "behind":
        return f"{upper(rival)} is ahead of {duel.contender} by {apart} in the closing score."
    return f"No difference shown: the closing scores of {duel.contender} and {rival} are {apart} apart."


def line_of(duel: Duel) -> str:
    """Return a line on a contender against a rival: time to a loss, equal time, closing score."""
    parts = [time_part(duel)]
    if duel.gap and duel.gap.middle is not None:
        words = difference_words(duel.gap.middle, duel.gap.comparison)
        parts.append(f"after {duration(duel.seconds)} of each {words}")
    if duel.score and duel.score.difference is not None:
        parts.append(f"in the closing score {difference_words(duel.score.difference, duel.score)}")
    elif duel.score:
        parts.append(f"closing score: {FEW}")
    return f"Against {attention(duel.rival)}, {duel.contender}: {'; '.join(parts)}."


def time_part(duel: Duel) -> str:
    """Return how long the contender takes to the lowest loss that it reaches, and the next one that it does not."""
    if duel.time is None or duel.loss is None:
        if duel.missed is None:
            return f"times {duel.why}"
        return f"{duel.missed:.2f} bits {ALREADY if duel.why == TOO_EARLY else duel.why}"
    if duel.time_verdict == FEW:
        assert duel.time.middle is not None
        return f"{duel.loss:.2f} bits in {math.exp(duel.time.middle):.2f} of its time ({FEW})"
    tied = ", no difference shown" if duel.time_verdict == "tied" else ""
    missed = f", {duel.missed:.2f} {duel.why}" if duel.missed is not None else ""
    return f"{duel.loss:.2f} bits in {ratio_span(duel.time)} of its time{tied}{missed}"


def difference_words(middle: float, comparison: Comparison) -> str:
    """Return a difference in bits in words: `0.050 ± 0.020 bits behind`."""
    words = {"better": "ahead", "behind": "behind"}
    if comparison.verdict in words:
        return f"{abs(middle):.3f} ± {comparison.half:.3f} bits {words[comparison.verdict]}"
    number = f"{middle:+.3f}".replace("-", MINUS)
    if comparison.verdict == FEW:
        return f"{number} bits ({FEW})"
    return f"no difference shown ({number} ± {comparison.half:.3f} bits)"


def further_lines(kinds: Kinds) -> list[str]:
    """Return what else to know before the tables: what is not ranked, has too few seeds, or is ahead of all."""
    lines = []
    unranked = [kind for kind in kinds.picked if kind not in kinds.legal]
    if unranked:
        verbs = "see the future and are" if len(unranked) > 1 else "sees the future and is"
        lines.append(f"{' and '.join(unranked)} {verbs} not ranked.")
    few = {kind: len(values) for kind, values in kinds.legal.items() if 0 < len(values) < SEEDS}
    if few and len(few) < len(kinds.legal):
        named = ", ".join(f"{kind} ({plural(count, 'seed')})" for kind, count in few.items())
        lines.append(f"No verdict on {named}: it takes {SEEDS} seeds.")
    if kinds.baseline:
        lines.append(f"The simple baseline {kinds.baseline} is ahead of every model.")
    return lines


def genitive(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


def upper(text: str) -> str:
    """Return a sentence that begins with a capital letter, unless it begins with the name of a kind of heads."""
    return text[0].upper() + text[1:] if text in FULL.values() else text
