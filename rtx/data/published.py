"""What was published of the text benchmarks: the counts that results are normalised by."""

from __future__ import annotations

WORDS: dict[str, dict[str, int]] = {
    "wikitext103": {"train": 103_227_021, "valid": 217_646, "test": 245_569},
    "pg19": {"train": 1_973_136_207, "valid": 3_007_061, "test": 6_966_499},
}
"""Words of each split, by which word perplexity divides the total nats, whatever the units of the model.

Wikitext-103 (Merity et al. 2016): words between blanks and one `<eos>` for every line, blank ones too. PG-19: the table
of Rae et al. 2020; their words cannot be recounted (blanks alone give about 1% more).
"""

VOCABULARY = {"wikitext103": 267_735}
"""Different words of the training split, `<unk>` and `<eos>` among them."""

DOCUMENTS: dict[str, dict[str, int]] = {
    "wikitext103": {"valid": 60, "test": 60},
    "pg19": {"train": 28_602, "valid": 50, "test": 100},
}
"""Articles and books of each split; one published training book of PG-19, 90.txt, has no text and counts here."""
