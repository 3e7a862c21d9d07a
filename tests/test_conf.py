"""The files of `conf/`: each composes, says where its values come from, and writes only what it may."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rtx.analysis.cost import cost
from rtx.analysis.footprint import footprint
from rtx.checks import resolve
from rtx.compose import compose
from rtx.config import GROUPS, composed_fields
from rtx.keys import conf_dir, options
from rtx.options import LAUNCHED

MODELS = options("model")
EXPERIMENTS = ("cifar10_grid", "cifar10_baselines", "wikitext103", "enwik8", "imagenet64", "pg19")
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
    extra = ["data.path=here"] if (group, option) in (("data", "text"), ("data", "images")) else []
    config = compose([f"{group}={option}", *extra])
    assert resolve(config) == config
    assert keys_of(group, option) <= set(composed_fields())


@pytest.mark.parametrize("group", [group for group in GROUPS if group not in ("routing", "experiment")])
def test_an_option_carries_its_own_name(group: str) -> None:
    for option in options(group):
        extra = ["data.path=here"] if option in ("text", "images") else []
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
    micro = config.trainer.micro_batch_size or config.trainer.batch_size
    planned = sum(footprint(config, cost(config, 256), micro, 256).values())
    assert planned < 40 * 2**30, f"{planned / 2**30:.1f} GiB"


def test_the_paper_and_not_the_released_code() -> None:
    rt24, rt12, rt10, rt22 = (compose([f"model={name}"]) for name in ("rt24", "rt12", "rt10", "rt22"))
    assert (rt24.model.layers, rt24.model.heads, rt24.data.length) == (24, 8, 8192)
    assert (rt24.routing.heads, rt24.routing.layers, rt24.routing.clusters, rt24.routing.window) == (4, 24, 32, 256)
    assert (rt24.model.attention_dropout, rt24.model.ffn_dropout, rt24.model.positions) == (0.4, 0.4, "shaw")
    assert (rt10.model.layers, rt10.model.heads, rt10.data.length) == (10, 16, 4096)
    assert (rt10.routing.heads, rt10.routing.clusters, rt10.routing.window) == (8, 16, 256)
    assert (rt10.model.attention_dropout, rt10.model.ffn_dropout) == (0.3, 0.3)
    assert (rt22.model.layers, rt22.model.heads, rt22.model.hidden, rt22.data.length) == (22, 8, 1032, 8192)
    assert (rt22.routing.heads, rt22.routing.layers, rt22.routing.window) == (2, 2, 512)
    assert (rt22.model.dropout, rt22.model.attention_dropout, rt22.model.ffn_dropout) == (0.0, 0.0, 0.0)
    assert dataclasses.replace(rt12.model, name="rt24", layers=24) == rt24.model
    assert dataclasses.replace(rt12.routing, layers=24) == rt24.routing


def test_the_image_presets() -> None:
    imagenet, cifar = compose(["model=rt24-imagenet64"]), compose(["model=rt12-cifar10"])
    assert (imagenet.model.layers, imagenet.model.heads, imagenet.data.length) == (24, 16, 64 * 64 * 3)
    assert (imagenet.routing.heads, imagenet.routing.clusters, imagenet.routing.window) == (8, 8, 2048)
    assert (cifar.model.layers, cifar.model.heads, cifar.data.length) == (12, 8, 32 * 32 * 3)
    assert (cifar.routing.clusters, cifar.routing.window) == (6, 512)
    assert imagenet.model.positions == cifar.model.positions == "learned"


def test_the_presets_of_other_papers() -> None:
    reformer, span = (compose([f"model={name}"]).model for name in ("reformer", "adaptive_span"))
    assert (reformer.heads, reformer.hidden, reformer.ffn_hidden, reformer.base) == (8, 1024, 4096, "lsh")
    assert (reformer.window, reformer.hash_rounds, reformer.hash_buckets, reformer.lsh) == (256, 2, 192, "causal")
    assert (span.layers, span.heads, span.hidden, span.ffn_hidden, span.base) == (24, 8, 768, 4096, "adaptive_span")
    assert (span.window, span.span_ramp, span.span_cost, span.ffn) == (8192, 32, 5e-7, "relu")


def test_the_sparse_transformers() -> None:
    presets = {name: compose([f"model={name}"]) for name in SPARSE}
    assert {(c.model.layers, c.model.heads, c.model.hidden, c.data.length) for c in presets.values()} == {
        (30, 8, 512, 12288),
        (128, 2, 256, 3072),
        (48, 16, 512, 12288),
    }
    for preset in presets.values():
        assert (preset.model.init, preset.model.recompute, preset.model.positions) == ("depth_scaled", True, "axial")
    text = presets["sparse_transformer"].model
    assert (text.base, text.stride, text.summary, text.dropout) == ("fixed", 128, 32, 0.4)
    parameters = {name: cost(preset, 256).parameters for name, preset in presets.items()}
    assert parameters["sparse_transformer"] == pytest.approx(95e6, rel=0.01)
    assert parameters["sparse_transformer-cifar10"] == pytest.approx(67e6, rel=0.01)
    assert parameters["sparse_transformer-imagenet64"] == pytest.approx(152e6, rel=0.01)


def test_the_optimizers_of_the_paper() -> None:
    adam = compose(["model=rt24"]).optimizer
    assert (adam.name, adam.lr, adam.beta1, adam.beta2, adam.schedule) == ("adam", 2e-4, 0.9, 0.98, "rsqrt")
    adafactor = compose(["model=rt22"]).optimizer
    assert (adafactor.name, adafactor.lr, adafactor.warmup, adafactor.schedule) == ("adafactor", 0.01, 10_000, "rsqrt")


@pytest.mark.parametrize(
    "experiment", [name for name in options("experiment") if "\n# Table" in text_of("experiment", name)]
)
def test_a_table_of_the_paper_says_its_command_score_cost_and_source(experiment: str) -> None:
    header = [line for line in text_of("experiment", experiment).splitlines() if line.startswith("#")]
    work, then = ("bench steps", "report") if experiment == "pg19_steps" else ("train", "eval")
    commands = (f"# Command: rtx {work} ", f"# Then: rtx {then} ")
    for title in ("# Table ", *commands, "# Score: ", "# Cost: ", "# Source: "):
        assert any(line.startswith(title) for line in header), title


def test_the_experiments_of_the_papers_tables() -> None:
    configs = {name: compose([f"experiment={name}"]) for name in EXPERIMENTS}
    assert {config.routing.selection for config in configs.values()} == {"topk"}
    optimizers = {name: config.optimizer.name for name, config in configs.items()}
    assert optimizers == {name: "adafactor" if name == "pg19" else "adam" for name in EXPERIMENTS}
    for config in configs.values():
        assert config.name == config.data.name
        assert config.trainer.steps == 200_000
        assert config.model.window == 512
    for name in ("cifar10_grid", "cifar10_baselines"):
        config = configs[name]
        assert (config.data.length, config.model.layers, config.model.heads) == (3072, 12, 8)
        assert (config.routing.clusters, config.trainer.batch_size) == (6, 32)
    presets = {name: config.model.name for name, config in configs.items()}
    assert presets == {
        "cifar10_grid": "rt12-cifar10",
        "cifar10_baselines": "rt12-cifar10",
        "wikitext103": "rt10",
        "enwik8": "rt12",
        "imagenet64": "rt24-imagenet64",
        "pg19": "rt22",
    }


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
