"""The first sentence of a report, of at most twenty words, and a line for each rival below it.

The sentence names the length, who wins and by how much: by the time to the lowest loss that both
reach and by who is ahead at the end, or without times by the closing scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rtx.errors import plural
from rtx.report.curves import BUDGETS, NOT_REACHED, TOO_EARLY, Finding
from rtx.report.ranking import FEW, SEEDS, Comparison, mean
from rtx.report.score_tables import Kinds
from rtx.report.times import (
    TimeFindings,
    duration,
    ratio_and_interval,
    ratio_from,
    ratio_number,
)
from rtx.tables import MINUS

LONG_NAMES = {"full": "full attention", "local+full": "local+full attention"}
"""Of kinds of heads whose names are adjectives."""

REACHED_TOO_EARLY = "already at a first validation, no time known"


@dataclass(frozen=True)
class Answer:
    """The first sentence, and the lines below it."""

    headline: str
    lines: Sequence[str]


@dataclass(frozen=True)
class Duel:
    """A kind of heads, the contender, against a rival.

    Args:
        score: of the closing scores; None: not compared.
        loss: the lowest of the compared losses to which there is a ratio of times.
        time: the finding at that loss.
        next_loss: the highest of the lower losses, to which there is no ratio.
        why: why there is none.
        gap: of the losses at the end of the equal time, which is `seconds`.
    """

    contender: str
    rival: str
    length: int
    unit: str
    score: Comparison | None
    loss: float | None = None
    time: Finding | None = None
    next_loss: float | None = None
    why: str = ""
    gap: Finding | None = None
    seconds: float = 0.0

    @property
    def score_verdict(self) -> str:
        return self.score.verdict if self.score else FEW

    @property
    def time_verdict(self) -> str:
        return self.time.comparison.verdict if self.time else FEW

    @property
    def gap_verdict(self) -> str:
        return self.gap.comparison.verdict if self.gap else FEW

    @property
    def ends_behind(self) -> bool:
        """Whether the contender is behind in the closing score, or at the end of equal time."""
        return "behind" in (self.score_verdict, self.gap_verdict)


def long_name(kind: str) -> str:
    """Return a kind of heads as the subject of a sentence."""
    return LONG_NAMES.get(kind, kind)


def answer(kinds: Kinds, findings: Sequence[TimeFindings]) -> Answer:
    """Return what may be concluded of the kinds of heads."""
    contender = contender_of(kinds, findings)
    duels = duels_of(contender, kinds, findings) if contender else []
    lines = [line_of(duel) for duel in duels] if kinds.most_seeds > 1 else []
    return Answer(headline(kinds, duels), [*lines, *further_lines(kinds)])


def contender_of(kinds: Kinds, findings: Sequence[TimeFindings]) -> str:
    """Return the kind that the headline is about; empty where there is none beside the rivals.

    Candidates are the kinds that are no rivals; those with five seeds, if any has them. The first
    rule that tells two apart decides: it is faster than the first rival; it reaches the lower loss;
    it takes less time to that; its mean is lower.
    """
    candidates = [kind for kind in kinds.order if kind in kinds.legal]
    no_rivals = [kind for kind in candidates if kind not in kinds.against]
    candidates = no_rivals or list(kinds.against[1:])
    with_seeds = [kind for kind in candidates if len(kinds.legal[kind]) >= SEEDS]
    candidates = with_seeds or candidates
    first_rival = kinds.against[0] if kinds.against else ""
    duels = [duel_of(kind, first_rival, kinds, findings) for kind in candidates]
    return min(duels, key=preference).contender if duels else ""


def preference(duel: Duel) -> tuple[bool, float, float]:
    """Return what orders contenders: the least is preferred."""
    is_slower = duel.time_verdict != "better"
    loss = math.inf if duel.loss is None else duel.loss
    log_ratio = duel.time.difference if duel.time else None
    return is_slower, loss, math.inf if log_ratio is None else log_ratio


def duels_of(contender: str, kinds: Kinds, findings: Sequence[TimeFindings]) -> list[Duel]:
    """Return the contender against each rival that comes before it."""
    rivals = list(kinds.against)
    if contender in rivals:
        rivals = rivals[: rivals.index(contender)]
    return [duel_of(contender, rival, kinds, findings) for rival in rivals]


def duel_of(kind: str, rival: str, kinds: Kinds, findings: Sequence[TimeFindings]) -> Duel:
    """Return a kind against a rival."""
    score = kinds.compared.get((kind, rival))
    result = next((one for one in findings if one.rival == rival), None)
    if result is None or kind not in result.seconds:
        why = "not compared"
        return Duel(kind, rival, kinds.length, kinds.unit, score, why=why)
    by_loss = {loss: result.times[kind, loss] for loss in result.losses}
    with_ratio = [loss for loss, finding in by_loss.items() if finding.difference is not None]
    loss = min(with_ratio, default=None)
    lower = [other for other in by_loss if loss is None or other < loss]
    next_loss = max(lower, default=None)
    why = "not compared" if loss is None else ""
    return Duel(
        kind,
        rival,
        kinds.length,
        kinds.unit,
        score,
        loss=loss,
        time=None if loss is None else by_loss[loss],
        next_loss=next_loss,
        why=why if next_loss is None else by_loss[next_loss].why,
        gap=result.gaps[kind, BUDGETS[-1]],
        seconds=result.seconds[kind],
    )


def headline(kinds: Kinds, duels: Sequence[Duel]) -> str:
    """Return the first sentence, of at most twenty words."""
    if kinds.most_seeds == 1:
        return "Not certain: 1 seed a row; no verdict."
    if len(kinds.legal) < 2:
        return "Nothing to compare: one kind of heads has a score that sees no future."
    if not any(kinds.legal.values()):
        chosen = "of several rows of a kind one is chosen"
        return f"Not certain: {chosen}, and no seeds are left to report it by."
    for duel in duels:
        if duel.score_verdict != FEW:
            return f"At length {duel.length:,}, {verdict_on(duel)}."
    return too_few_seeds(kinds)


def too_few_seeds(kinds: Kinds) -> str:
    """Return which kind has the lowest mean, and that it takes more seeds for a verdict."""
    with_scores = {kind: values for kind, values in kinds.legal.items() if values}
    lowest = min(with_scores, key=lambda kind: mean(with_scores[kind].values()))
    counts = [len(values) for values in with_scores.values()]
    seeds = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    have = f"a verdict takes {SEEDS} seeds; here {seeds}"
    return f"Not certain: {lowest} heads have the lowest mean, but {have}."


def verdict_on(duel: Duel) -> str:
    """Return who wins and by how much, as a clause of at most seventeen words."""
    if duel.time is None or duel.time_verdict == FEW:
        return verdict_by_score(duel)
    if duel.time_verdict == "better":
        return verdict_on_faster(duel)
    if duel.time_verdict == "behind":
        return verdict_on_slower(duel)
    return verdict_on_tie(duel)


def verdict_on_faster(duel: Duel) -> str:
    """Return the verdict on a contender that takes less time to a loss.

    "routing (causal) wins: 2.36 bits in 0.45 (0.43 to 0.47) of full attention's time". It does not
    win where it ends behind, or misses a lower loss that the rival reaches.
    """
    assert duel.time is not None
    share = f"{ratio_and_interval(duel.time)} of {genitive(long_name(duel.rival))} time"
    reaches = f"{duel.contender} reaches {duel.loss:.2f} bits in {share}"
    if duel.ends_behind:
        return f"{reaches}, but ends {bits_behind(duel):.3f} bits behind"
    if duel.next_loss is not None:
        return f"{reaches}, but {misses(duel)}"
    return f"{duel.contender} wins: {duel.loss:.2f} bits in {share}"


def verdict_on_slower(duel: Duel) -> str:
    """Return the verdict on a contender that takes more time to a loss.

    "full attention wins: routing (causal) takes 2.10 (2.00 to 2.20) times as long to 2.24 bits".
    """
    assert duel.time is not None and duel.time.difference is not None
    if duel.score_verdict == "better" and not duel.ends_behind:
        ratio = ratio_number(ratio_from(duel.time.difference))
        slower = f"though slower to {duel.loss:.2f} bits ({ratio})"
        ahead = f"{margin(duel.score)} {duel.unit} ahead of {long_name(duel.rival)}"
        return f"{duel.contender} ends {ahead}, {slower}"
    longer = f"{ratio_and_interval(duel.time)} times as long to {duel.loss:.2f} bits"
    return f"{long_name(duel.rival)} wins: {duel.contender} takes {longer}"


def verdict_on_tie(duel: Duel) -> str:
    """Return the verdict on a contender whose time to a loss differs by no more than chance.

    "full attention wins: routing (causal) ends 0.144 ± 0.130 bits/byte behind; time to 2.31 bits
    tied".
    """
    assert duel.time is not None
    tied = f"time to {duel.loss:.2f} bits tied"
    rival = long_name(duel.rival)
    if duel.score_verdict == "behind":
        behind = f"{margin(duel.score)} {duel.unit} behind"
        return f"{rival} wins: {duel.contender} ends {behind}; {tied}"
    if duel.gap_verdict == "behind" and duel.gap:
        behind = f"{margin(duel.gap.comparison)} {duel.unit} behind at equal time"
        return f"{rival} wins: {duel.contender} ends {behind}"
    if duel.score_verdict == "better":
        ahead = f"{margin(duel.score)} {duel.unit} ahead of {rival}"
        return f"{duel.contender} ends {ahead}; {tied}"
    if duel.gap_verdict == "better" and duel.gap:
        ahead = f"{margin(duel.gap.comparison)} {duel.unit} ahead of {rival}"
        return f"{duel.contender} ends {ahead} at equal time"
    share = f"{ratio_and_interval(duel.time)} of {genitive(rival)} time"
    reaches = f"{duel.contender} reaches {duel.loss:.2f} bits in {share}"
    if duel.next_loss is not None:
        return f"no winner: {reaches}, {misses(duel)}"
    return f"no winner shown: {reaches}"


def verdict_by_score(duel: Duel) -> str:
    """Return who wins by the closing scores.

    "full attention wins by 0.100 ± 0.010 bits/byte in the closing score over routing (causal)".
    """
    rival = long_name(duel.rival)
    apart = f"{margin(duel.score)} {duel.unit}"
    if duel.score_verdict == "better":
        return f"{duel.contender} wins by {apart} in the closing score over {rival}"
    if duel.score_verdict == "behind":
        return f"{rival} wins by {apart} in the closing score over {duel.contender}"
    return f"no winner shown: closing scores of {duel.contender} and {rival} are {apart} apart"


def margin(comparison: Comparison | None) -> str:
    """Return the size of a difference and half its interval: `0.144 ± 0.130`."""
    assert comparison is not None and comparison.difference is not None
    return f"{abs(comparison.difference):.3f} ± {comparison.half:.3f}"


def bits_behind(duel: Duel) -> float:
    """Return by how many bits a contender ends behind: in the closing score, or at equal time."""
    if duel.score and duel.score.difference is not None and duel.score_verdict == "behind":
        return duel.score.difference
    assert duel.gap is not None and duel.gap.difference is not None
    return duel.gap.difference


def misses(duel: Duel) -> str:
    """Return that a contender misses the next loss, in all of its runs or in some."""
    how = "misses" if duel.why == NOT_REACHED else "sometimes misses"
    return f"{how} {duel.next_loss:.2f}"


def line_of(duel: Duel) -> str:
    """Return a line on a contender against a rival: time to a loss, equal time, closing score."""
    parts = [time_part(duel)]
    if duel.gap and duel.gap.difference is not None:
        gap = difference_words(duel.gap.difference, duel.gap.comparison)
        parts.append(f"after {duration(duel.seconds)} each, {gap}")
    if duel.score and duel.score.difference is not None:
        score = difference_words(duel.score.difference, duel.score)
        parts.append(f"in the closing score {score}")
    elif duel.score:
        parts.append(f"closing score: {FEW}")
    return f"Against {long_name(duel.rival)}, {duel.contender}: {'; '.join(parts)}."


def time_part(duel: Duel) -> str:
    """Return the time to the lowest loss with a ratio, and the next loss, which has none."""
    if duel.time is None or duel.loss is None:
        if duel.next_loss is None:
            return f"times {duel.why}"
        why = REACHED_TOO_EARLY if duel.why == TOO_EARLY else duel.why
        return f"{duel.next_loss:.2f} bits {why}"
    if duel.time_verdict == FEW:
        assert duel.time.difference is not None
        ratio = ratio_number(ratio_from(duel.time.difference))
        return f"{duel.loss:.2f} bits in {ratio} of its time ({FEW})"
    part = f"{duel.loss:.2f} bits in {ratio_and_interval(duel.time)} of its time"
    if duel.time_verdict == "tied":
        part += ", no difference shown"
    if duel.next_loss is not None:
        part += f", {duel.next_loss:.2f} {duel.why}"
    return part


def difference_words(difference: float, comparison: Comparison) -> str:
    """Return a difference in bits in words: `0.050 ± 0.020 bits behind`."""
    words = {"better": "ahead", "behind": "behind"}
    if comparison.verdict in words:
        return f"{abs(difference):.3f} ± {comparison.half:.3f} bits {words[comparison.verdict]}"
    number = f"{difference:+.3f}".replace("-", MINUS)
    if comparison.verdict == FEW:
        return f"{number} bits ({FEW})"
    return f"no difference shown ({number} ± {comparison.half:.3f} bits)"


def further_lines(kinds: Kinds) -> list[str]:
    """Return what else to know first: what is not ranked, has few seeds, or is ahead of all."""
    lines = []
    unranked = [kind for kind in kinds.picked if kind not in kinds.legal]
    if unranked:
        verbs = "see the future and are" if len(unranked) > 1 else "sees the future and is"
        lines.append(f"{' and '.join(unranked)} {verbs} not ranked.")
    few = {kind: len(values) for kind, values in kinds.legal.items() if 0 < len(values) < SEEDS}
    if few and len(few) < len(kinds.legal):
        names = ", ".join(f"{kind} ({plural(count, 'seed')})" for kind, count in few.items())
        lines.append(f"No verdict on {names}: it takes {SEEDS} seeds.")
    if kinds.baseline:
        lines.append(f"The simple baseline {kinds.baseline} is ahead of every model.")
    return lines


def genitive(name: str) -> str:
    """Return the possessive form of a name."""
    return f"{name}'" if name.endswith("s") else f"{name}'s"
