"""`model.start`: training goes on from the weights and the tokenizer of a Llama-type model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra rtx[hf] is not installed")

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from rtx import load
from rtx.data.catalog import find_data, open_data
from rtx.data.tokenizers import read_pretrained
from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.run_config import load_run_config
from rtx.training.start import build_model
from tests.helpers.small_runs import Workshop, final
from tests.hf.small_models import BYTES, save_small_model

LENGTH = 24
DENSE = ("model.base=full", "routing=none")
WHOLE = ("routing.heads=2", "routing.layers=1", f"routing.window={LENGTH}", "routing.clusters=1")
"""Routing heads that read all of their prefix."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama and a tokenizer of bytes."""
    return save_small_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of it to be spoilt."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def start_of(folder: Path, *options: str) -> Any:
    """Return the model that a run begins with."""
    words = ("data.tokenizer=bytes", f"data.length={LENGTH}", f"model.start={folder}")
    config = compose([*words, *options])
    return build_model(config, BYTES, lambda: tokens()[0]).eval()


def tokens() -> torch.Tensor:
    """Return random tokens `[B, N]`, the same in every call."""
    return torch.randint(BYTES, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def nats_of(model: Any, bos: int) -> torch.Tensor:
    """Return the nats of `tokens()` after the token `bos`, by a model of transformers."""
    start_B1 = torch.full((2, 1), bos)
    logits_BNV = model(torch.cat([start_B1, tokens()[:, :-1]], dim=1)).logits
    return F.cross_entropy(logits_BNV.mT, tokens(), reduction="none")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("options", [DENSE, ("model.base=full", "routing=probed", *WHOLE)])
@torch.no_grad()
def test_scores_are_those_of_the_model(
    tmp_path: Path, is_tied: bool, options: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-4}
    rotary: Any = {"rope_type": "default", "rope_theta": 500_000.0}
    config = LlamaConfig(
        vocab_size=BYTES,
        bos_token_id=7,
        tie_word_embeddings=is_tied,
        rope_parameters=rotary,
        **sizes,
        **heads,
    )
    theirs = LlamaForCausalLM(config).eval()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.25)
    # Several files, and numbers of 16 bits.
    theirs.bfloat16().save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    ours = start_of(tmp_path, *options).double()
    assert ours.count_parameters() == theirs.num_parameters() + 16 + BYTES
    expected_BN = nats_of(theirs.double(), bos=7)
    nats_BN, _ = ours.loss(tokens())
    torch.testing.assert_close(nats_BN, expected_BN, rtol=1e-5, atol=1e-5)


def test_a_run_starts_goes_on_and_is_resumed_without_the_model(
    workshop: Workshop, folder: Path, tmp_path: Path
) -> None:
    start = tmp_path / "model"
    shutil.copytree(folder, start)
    heads = ("model.base=full", "routing=causal", "routing.heads=2", "routing.layers=1")
    data = ("data=text", workshop.text, "data.length=32", "routing.window=8")
    steps = ("trainer.steps=4", "trainer.batch_size=4", "trainer.val_every=4", "optimizer.warmup=1")
    run = tmp_path / "run"
    words = ("hardware=cpu", "logger=jsonl", *heads, *data, *steps)
    workshop.command("train", f"model.start={start}", *words, run=run)
    config = load_run_config(run)
    assert config.model.kv_heads == 2 and config.model.ffn == "swiglu"
    assert config.routing.keys == "separate" and config.routing.init == "data"
    before = final(run)
    assert before["unit"] == "subword"
    shutil.rmtree(start)
    workshop.command("resume", str(run), "trainer.steps=8", code=2)
    path = f"data.tokenizer_path={run / 'pretrained.json'}"
    workshop.command("resume", str(run), "trainer.steps=8", path)
    assert final(run)["bits"] < before["bits"]
    assert load(run, device="cpu").tokenizer.name == "pretrained"


def test_keys_of_the_user_stay_or_are_refused(folder: Path) -> None:
    config = compose([f"model.start={folder}", "routing=causal", "routing.keys=tied"])
    assert config.routing.keys == "tied" and config.routing.rotary
    assert config.model.layers == 2 and config.data.tokenizer_path == str(folder)
    with pytest.raises(UserError) as refused:
        compose([f"model.start={folder}", "model.layers=3", "model.ffn=gelu"])
    assert str(refused.value).splitlines() == [
        f"model.layers=3: the weights of model.start={folder} need 2; leave the key out",
        f"model.ffn=gelu: the weights of model.start={folder} need swiglu; leave the key out",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["QwenForCausalLM"]}, 'architectures.0="QwenForCausalLM" must be'),
        ({"model_type": "mistral"}, "model_type=\"mistral\" must be 'llama'"),
        ({"rope_scaling": {"factor": 8.0}}, 'rope_scaling={"factor": 8.0} must be null'),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope_parameters.rope_type=\"llama3\" must be 'default'",
        ),
        (
            {"rope_parameters": {"factor": 8.0}},
            "rope_parameters.factor=8.0 must be left out: rtx has plain rotary angles",
        ),
        ({"head_dim": 16}, "head_dim=16: hidden_size / num_attention_heads = 8"),
        ({"attention_bias": True}, "attention_bias=true must be False"),
        ({"mlp_bias": True}, "mlp_bias=true must be False"),
        ({"hidden_act": "gelu"}, "hidden_act=\"gelu\" must be 'silu'"),
        ({"bos_token_id": None}, "bos_token_id=null must be a valid integer"),
        ({"bos_token_id": 999}, "bos_token_id=999 must be a token below vocab_size=256"),
        ({"num_hidden_layers": "2"}, 'num_hidden_layers="2" must be a valid integer'),
        ({"num_attention_heads": 0, "head_dim": None}, "model.heads=0"),
    ],
)
def test_models_that_rtx_cannot_be_are_refused(
    copy: Path, fields: dict[str, Any], message: str
) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(UserError) as refused:
        compose([f"model.start={copy}"])
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_weights_that_do_not_fit_are_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    weights = load_file(path)
    norm = weights.pop("model.norm.weight")
    for change, message in (
        ({}, "its *.safetensors have no model.norm.weight"),
        ({"model.norm.weight": norm[1:]}, "model.norm.weight has the shape [31], and not [32]"),
        ({"model.norm.weight": norm, "other": norm.clone()}, "no place for its other"),
    ):
        save_file(weights | change, path)
        with pytest.raises(UserError, match=r"model\.start=") as refused:
            start_of(copy, *DENSE)
        assert message in str(refused.value)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read"):
        start_of(copy, *DENSE)
    torch.save(weights, copy / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(UserError, match="pickled weights are not read"):
        start_of(copy, *DENSE)
    with pytest.raises(UserError, match=r"expected a folder with config\.json"):
        start_of(copy / "elsewhere", *DENSE)


def test_a_model_reads_tokens_of_its_vocabulary_alone(folder: Path) -> None:
    config = compose([f"model.start={folder}", "data=mqar", *DENSE])
    with pytest.raises(UserError, match="its vocabulary has 256 tokens, the data's 11"):
        build_model(config, 11, lambda: tokens()[0])


def byte_level(lacking: str = "") -> Tokenizer:
    """Return a tokenizer of bytes, a word and a special token, without some bytes."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet()} - {*lacking})
    words = [*alphabet, "Ġa", "Ġab"]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[("Ġ", "a"), ("Ġa", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def test_subwords_of_a_model_spell_any_bytes(tmp_path: Path) -> None:
    theirs = byte_level(lacking="ÿ")
    path = tmp_path / "tokenizer.json"
    theirs.save(str(path))
    ours = read_pretrained(str(path))
    assert ours.vocabulary == 258 and read_pretrained(str(tmp_path)).describe() == ours.describe()
    text = "an ab ab\n\n  größer 字 <|end|>\r\n"
    assert ours.encode(text.encode()).tolist() == theirs.encode(text).ids
    assert ours.decode(ours.encode(text.encode())) == text.encode()
    assert ours.decode(ours.encode(b"\xc3 ab\n ab\xfe")) == b"\xc3 ab\n ab\xfe"
    assert ours.decode(ours.encode(b"\xff")) == "\N{REPLACEMENT CHARACTER}".encode()


def test_tokenizers_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    option = f"data.tokenizer_path={path}"
    with pytest.raises(UserError, match=f"{option}: expected a tokenizer.json"):
        read_pretrained(str(path))
    path.write_text("{}")
    with pytest.raises(UserError, match=f"{option}: no tokenizer.json"):
        read_pretrained(str(path))
    other = byte_level()
    other.decoder = decoders.Metaspace()
    other.save(str(path))
    with pytest.raises(UserError, match="its subwords are not of bytes"):
        read_pretrained(str(path))
    with pytest.raises(UserError, match=r"tokenizer=pretrained needs data\.tokenizer_path"):
        compose(["data.tokenizer=pretrained"])


def test_a_store_is_of_one_tokenizer(workshop: Workshop, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_level().save(str(path))
    words = ["data=text", workshop.text, "data.tokenizer=pretrained", "data.length=256"]
    data = compose([*words, f"data.tokenizer_path={path}"]).data
    root = tmp_path / "data"
    store = open_data(data, root, lambda line: None)
    assert store.vocabulary == 259 and find_data(data, root).fingerprint == store.fingerprint
    byte_level(lacking="ÿ").save(str(path))
    with pytest.raises(UserError, match="prepare"):
        find_data(data, root)
