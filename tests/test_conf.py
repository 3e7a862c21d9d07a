"""The files of `conf/`: each composes, says where its values come from, and writes only what it may."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rtx.analysis.cost import cost
from rtx.analysis.footprint import choose_micro_batch
from rtx.checks import resolve
from rtx.compose import compose
from rtx.config import GROUPS, all_fields
from rtx.keys import conf_dir, options
from rtx.options import LAUNCHED

MODELS = options("model")
CIFAR10 = (
    "model.name=rt12-cifar10 data.length=3072 model.layers=12 model.heads=8 routing.clusters=6 optimizer.name=adam"
)
EXPERIMENTS = {
    "cifar10_grid": CIFAR10,
    "cifar10": CIFAR10,
    "wikitext103": "model.name=rt10 optimizer.name=adam",
    "enwik8": "model.name=rt12 optimizer.name=adam",
    "imagenet64": "model.name=rt24-imagenet64 optimizer.name=adam",
    "pg19": "model.name=rt22 optimizer.name=adafactor",
}
ENWIK8 = (
    "model.heads=8 data.length=8192 routing.heads=4 routing.clusters=32 routing.window=256 model.attention_dropout=0.4"
)
ADAM = "optimizer.name=adam optimizer.lr=2e-4 optimizer.beta1=0.9 optimizer.beta2=0.98 optimizer.schedule=rsqrt"
SAID = {
    "rt24": f"model.layers=24 routing.layers=24 model.ffn_dropout=0.4 model.positions=shaw {ENWIK8} {ADAM}",
    "rt12": f"model.layers=12 routing.layers=12 model.ffn_dropout=0.4 model.positions=shaw {ENWIK8}",
    "rt10": "model.layers=10 model.heads=16 data.length=4096 routing.heads=8 routing.clusters=16 routing.window=256 "
    "model.attention_dropout=0.3 model.ffn_dropout=0.3",
    "rt22": "model.layers=22 model.heads=8 model.hidden=1032 data.length=8192 routing.heads=2 routing.layers=2 "
    "routing.window=512 model.dropout=0 model.attention_dropout=0 model.ffn_dropout=0 optimizer.name=adafactor "
    "optimizer.lr=0.01 optimizer.warmup=10000 optimizer.schedule=rsqrt",
    "rt24-imagenet64": "model.layers=24 model.heads=16 data.length=12288 routing.heads=8 routing.clusters=8 "
    "routing.window=2048 model.positions=learned",
    "rt12-cifar10": "model.layers=12 model.heads=8 data.length=3072 routing.clusters=6 routing.window=512 "
    "model.positions=learned",
    "reformer": "model.heads=8 model.hidden=1024 model.ffn_hidden=4096 model.base=lsh model.window=256 "
    "model.hash_rounds=2 model.hash_buckets=192 model.lsh=causal",
    "adaptive_span": "model.layers=24 model.heads=8 model.hidden=768 model.ffn_hidden=4096 model.base=adaptive_span "
    "model.window=8192 model.span_ramp=32 model.span_cost=5e-7 model.ffn=relu",
    "sparse_transformer": "model.layers=30 model.heads=8 model.hidden=512 data.length=12288 model.base=fixed "
    "model.stride=128 model.summary=32 model.dropout=0.4 model.init=depth_scaled model.positions=axial",
    "sparse_transformer-cifar10": "model.layers=128 model.heads=2 model.hidden=256 data.length=3072",
    "sparse_transformer-imagenet64": "model.layers=48 model.heads=16 model.hidden=512 data.length=12288 "
    "model.recompute=true",
}
"""What papers say of their models: naming it changes nothing of a preset."""
PAPER = [model for model in MODELS if model != "tiny"]
SPARSE = {"sparse_transformer", "sparse_transformer-cifar10", "sparse_transformer-imagenet64"}
BASELINES = {"reformer", "adaptive_span", *SPARSE}
"""Presets of other papers' models, where no head routes."""
ROUTING_KEYS = {"heads", "layers", "window", "clusters"}


def text_of(group: str, option: str) -> str:
    """Return the text of an option's file."""
    return (conf_dir() / group / f"{option}.yaml").read_text()


def keys_of(group: str, option: str) -> set[str]:
    """Return the dotted keys that an option's file sets, its defaults list apart."""
    node = OmegaConf.load(conf_dir() / group / f"{option}.yaml")
    assert isinstance(node, DictConfig)
    keys = set()
    for key, value in node.items():
        names = [f"{key}.{name}" for name in value] if isinstance(value, DictConfig) else [str(key)]
        keys |= set(names if "_global_" in text_of(group, option) else (f"{group}.{name}" for name in names))
    return {key for key in keys if key not in ("defaults", "hydra.sweeper", "hydra.launcher")}


def files() -> list[tuple[str, str]]:
    """Return every option of every group."""
    return [(group, option) for group in GROUPS for option in options(group)]


@pytest.mark.parametrize(("group", "option"), files())
def test_every_option_composes_and_sets_keys_of_the_schema(group: str, option: str) -> None:
    extra = ["data.path=here"] if (group, option) in (("data", "text"), ("data", "images"), ("data", "hub")) else []
    config = compose([f"{group}={option}", *extra])
    assert resolve(config) == config
    assert keys_of(group, option) <= set(all_fields())


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("routing", "experiment")])
def test_an_option_carries_its_own_name(group: str) -> None:
    for option in options(group):
        extra = ["data.path=here"] if option in ("text", "images", "hub") else []
        name = getattr(compose([f"{group}={option}", *extra]), group).name
        assert name == ("auto" if option in LAUNCHED else option)  # a job is to be the same cell wherever it runs


@pytest.mark.parametrize("selection", options("routing"))
def test_every_preset_takes_every_routing(selection: str) -> None:
    for model in MODELS:
        config = compose([f"model={model}", f"routing={selection}"])
        assert config.routing.selection == selection
        assert (config.routing.heads == 0) == (model in BASELINES)
        assert (config.routing.clusters or 0) * config.routing.window >= config.data.length


@pytest.mark.parametrize("model", MODELS)
def test_a_model_writes_the_model_the_length_and_the_size_of_the_routing(model: str) -> None:
    keys = keys_of("model", model)
    assert "model.window" in keys
    assert {key for key in keys if key.startswith("data.")} == {"data.length"}
    routing = {key.partition(".")[2] for key in keys if key.startswith("routing.")}
    assert routing == ROUTING_KEYS | ({"decay", "logit_scale"} if model == "tiny" else set())
    assert {key.partition(".")[0] for key in keys} == {"model", "data", "routing"}


@pytest.mark.parametrize("model", MODELS)
def test_a_model_says_its_command_its_source_and_the_papers_score(model: str) -> None:
    header = [line for line in text_of("model", model).splitlines() if line.startswith("#")]
    for title in (
        "# Command: rtx ",
        "# Source: ",
        *(("# Score: ", "# The released code differs") if model in PAPER else ()),
    ):
        assert any(line.startswith(title) for line in header), title


@pytest.mark.parametrize("model", MODELS)
def test_the_command_of_a_header_composes_and_fits_on_one_device(model: str) -> None:
    (line,) = (line for line in text_of("model", model).splitlines() if line.startswith("# Command: rtx "))
    words = line.partition("rtx ")[2].replace("<wiki.train.tokens>", "w").replace("<folder of books>", "b").split()
    overrides = [word for word in words[1:] if "=" in word and not word.startswith("(")]
    config = compose([override for override in overrides if not override.endswith(":")])
    assert choose_micro_batch(config, 256, 40 * 2**30).fits


@pytest.mark.parametrize("model", [model for model in PAPER if model in SAID])
def test_the_paper_and_not_the_released_code(model: str) -> None:
    assert compose([f"model={model}"]) == compose([f"model={model}", *SAID[model].split()])


def test_the_sparse_transformers() -> None:
    parameters = {name: cost(compose([f"model={name}"]), 256).parameters for name in SPARSE}
    assert parameters["sparse_transformer"] == pytest.approx(95e6, rel=0.01)
    assert parameters["sparse_transformer-cifar10"] == pytest.approx(67e6, rel=0.01)
    assert parameters["sparse_transformer-imagenet64"] == pytest.approx(152e6, rel=0.01)


@pytest.mark.parametrize(
    "experiment", [name for name in options("experiment") if "\n# Table" in text_of("experiment", name)]
)
def test_a_table_of_the_paper_says_its_command_score_cost_and_source(experiment: str) -> None:
    header = [line for line in text_of("experiment", experiment).splitlines() if line.startswith("#")]
    work, then = ("bench steps", "report") if experiment == "pg19_steps" else ("train", "eval")
    commands = (f"# Command: rtx {work} ", f"# Then: rtx {then} ")
    for title in ("# Table ", *commands, "# Score: ", "# Cost: ", "# Source: "):
        assert any(line.startswith(title) for line in header), title


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_experiments_of_the_papers_tables(experiment: str) -> None:
    config = compose([f"experiment={experiment}"])
    assert config == compose([f"experiment={experiment}", *EXPERIMENTS[experiment].split()])
    assert config.name == config.data.name and config.routing.selection == "topk"
    assert (config.trainer.steps, config.model.window) == (200_000, 512)


def test_nothing_in_conf_names_a_class_or_asks_the_host() -> None:
    for path in conf_dir().rglob("*"):
        if path.is_file():
            assert path.suffix == ".yaml"
            text = path.read_text()
            assert "_target_" not in text
            assert "${oc." not in text
            assert max(map(len, text.splitlines())) <= 120, path


def test_conf_stands_where_the_wheel_puts_it_or_beside_the_package() -> None:
    assert conf_dir() == Path(__file__).resolve().parents[1] / "conf"
    assert (conf_dir() / "config.yaml").is_file()
