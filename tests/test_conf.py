"""The files of `conf/`: each composes, says where its values come from, writes only what it may,
and takes a step.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from rtx.analysis.cost import cost
from rtx.analysis.micro_batch import choose_micro_batch
from rtx.attention.centroids import Centroids, after_step
from rtx.attention.indexer import Indexer
from rtx.cli import help
from rtx.cli.help import candidates
from rtx.errors import UserError
from rtx.model.transformer import Transformer
from rtx.report.summary import routing_lines
from rtx.settings.compose import NAMED_BY_FILE, compose, heads_option
from rtx.settings.data_sets import IMAGE_SETS, MADE
from rtx.settings.identity import cell_hashes
from rtx.settings.overrides import LAUNCHED, check_overrides
from rtx.settings.presets import CONFIG_DIRS, conf_dir, forget, options
from rtx.settings.rules import resolve
from rtx.settings.schema import CLUSTERED, GROUPS, Config, all_fields, to_dict, with_values
from rtx.sweeps.cells import lay_out, own_axes
from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate

MODELS = options("model")
XL = (
    "model.base=recurrent model.positions=xl model.ffn=relu model.norm=post "
    "model.tie_embeddings=true"
)
SAID = {
    **{f"rt{layers}": f"routing.layers={layers}" for layers in (10, 12)},
    "rt24": (
        "model.layers=24 routing.layers=24 model.heads=8 data.length=8192 routing.heads=4 "
        "routing.clusters=32 routing.window=256 model.positions=shaw "
        "model.attention_dropout=0.4 model.ffn_dropout=0.4 optimizer.name=adam "
        "optimizer.lr=2e-4 optimizer.beta1=0.9 optimizer.beta2=0.98 optimizer.schedule=rsqrt"
    ),
    "reformer": (
        "model.heads=8 model.hidden=1024 model.ffn_hidden=4096 model.base=lsh "
        "model.window=256 model.hash_rounds=2 model.hash_buckets=192 model.lsh=causal"
    ),
    "adaptive_span": (
        "model.layers=24 model.heads=8 model.hidden=768 model.ffn_hidden=4096 "
        "model.base=adaptive_span model.window=8192 model.span_ramp=32 model.span_cost=5e-7 "
        "model.ffn=relu"
    ),
    "transformer_xl": (
        "model.layers=18 model.heads=16 model.hidden=1024 model.ffn_hidden=4096 "
        "data.length=384 model.memory=384 model.dropout=0.2 model.attention_dropout=0.2 "
        f"model.tie_biases=false {XL}"
    ),
    "transformer_xl-base": (
        "model.layers=16 model.heads=10 model.hidden=410 model.ffn_hidden=2100 "
        "data.length=150 model.memory=150 model.dropout=0.1 model.attention_dropout=0 "
        f"model.tie_biases=true {XL}"
    ),
    "transformer_xl-enwik8": (
        "model.layers=24 model.heads=8 model.hidden=1024 model.ffn_hidden=3072 "
        "data.length=768 model.memory=768 model.dropout=0.15 model.attention_dropout=0.15 "
        f"model.tie_biases=true {XL}"
    ),
    "adaptive_input": (
        "model.layers=16 model.heads=16 model.hidden=1024 model.base=full "
        "model.embedding=adaptive model.cutoffs=20000x60000 model.band_factor=4 "
        "model.tie_embeddings=true model.dropout=0.3"
    ),
    "compressive_transformer": (
        "model.layers=36 data.length=512 model.memory=512 model.compressed=512 "
        "model.compression_rate=2 model.compression=conv"
    ),
    "compressive_transformer-enwik8": (
        "model.layers=24 data.length=768 model.memory=768 model.compressed=1152 "
        "model.compression_rate=3 model.hidden=1024"
    ),
    "sparse_transformer": (
        "model.layers=30 model.heads=8 model.hidden=512 data.length=12288 model.base=fixed "
        "model.stride=128 model.summary=32 model.dropout=0.4 model.init=depth_scaled "
        "model.positions=axial"
    ),
    "sparse_transformer-cifar10": (
        "model.layers=128 model.heads=2 model.hidden=256 data.length=3072"
    ),
    "sparse_transformer-imagenet64": (
        "model.layers=48 model.heads=16 model.hidden=512 data.length=12288 model.recompute=true"
    ),
}
"""What papers say of models that are no row of ours in tests/report/test_paper.py: naming it
changes nothing.
"""
SPARSE = {
    "sparse_transformer": 95e6,
    "sparse_transformer-cifar10": 67e6,
    "sparse_transformer-imagenet64": 152e6,
}
"""Parameters as their paper counts them."""
BASELINES = {model for model in SAID if not model.startswith("rt")}
"""Presets of other papers' models, where no head routes."""
NEEDS_A_PATH = {"data=text", "data=images", "data=hub"}
INDEPENDENT = ("data", "hardware", "logger", "routing", "trainer")
"""Groups whose options can be combined freely."""
HASHES = json.loads(Path(__file__).with_name("preset_hashes.json").read_text())
"""Both names that the folder of a cell may have, by the words of presets that runs were recorded
with.
"""


def header(group: str, option: str) -> list[str]:
    text = (conf_dir() / group / f"{option}.yaml").read_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "_target_" not in text and "${oc." not in text, (
        "nothing in conf/ names a class or asks the host"
    )
    return [line for line in text.splitlines() if line.startswith("#")]


def keys_of(group: str, option: str) -> set[str]:
    """Return the dotted keys that an option's file sets, but for its defaults and Hydra's keys."""
    node = OmegaConf.load(conf_dir() / group / f"{option}.yaml")
    assert isinstance(node, DictConfig)
    keys = {
        f"{key}.{name}"
        for key, value in node.items()
        if isinstance(value, DictConfig)
        for name in value
    }
    keys |= {str(key) for key, value in node.items() if not isinstance(value, DictConfig)}
    keys.discard("defaults")
    keys = (
        keys
        if "# @package _global_" in header(group, option)
        else {f"{group}.{key}" for key in keys}
    )
    return {key for key in keys if key not in ("hydra.sweeper", "hydra.launcher")}


@pytest.mark.parametrize(
    ("group", "option"), [(group, option) for group in GROUPS for option in options(group)]
)
def test_an_option_sets_keys_of_the_schema(group: str, option: str) -> None:
    assert keys_of(group, option) <= set(all_fields())


def words_of_options() -> Iterator[str]:
    """Yield overrides that together choose every option but experiments and those of heads.

    Each combines one option of each group in INDEPENDENT, or chooses one model or optimizer.
    test_every_cell_of_every_experiment composes the others.
    """
    for group in ("model", "optimizer"):
        yield from (f"{group}={option}" for option in options(group))
    columns = [[f"{group}={option}" for option in options(group)] for group in INDEPENDENT]
    for row in itertools.zip_longest(*columns):
        yield " ".join(word for word in row if word)


@pytest.mark.parametrize("words", list(words_of_options()))
def test_options_compose_and_carry_their_own_names(words: str) -> None:
    overrides = words.split()
    if NEEDS_A_PATH.intersection(overrides):
        overrides.append("data.path=here")
    config = compose(overrides)
    assert resolve(config) == config
    for word in words.split():
        group, _, option = word.partition("=")
        if group in NAMED_BY_FILE:
            # A job is the same cell wherever it runs.
            name = "auto" if option in LAUNCHED else option
            assert getattr(config, group).name == name


def test_every_option_of_heads_is_a_cell_of_an_experiment() -> None:
    """So test_every_cell_of_every_experiment composes it."""
    chosen = set()
    for experiment in options("experiment"):
        for axis in own_axes(experiment):
            if axis.key == "heads":
                chosen |= {heads_option(word, experiment) for word in axis.values}
    assert chosen == {*options("heads")}


def words_of_cell(words: str) -> list[str]:
    """Return the overrides of a recorded cell.

    `experiment=X heads=Y` becomes `experiment=X_baselines heads=Y`, which
    test_every_cell_of_every_experiment has composed already.
    """
    experiment, *others = words.split() or [""]
    laid_out = f"{experiment.removeprefix('experiment=')}_baselines"
    if others and laid_out in options("experiment"):
        return [f"experiment={laid_out}", *others]
    return words.split()


@pytest.mark.parametrize("overrides_of", [str.split, words_of_cell], ids=["recorded", "laid-out"])
def test_cells_that_were_recorded_are_found_by_their_presets(
    overrides_of: Callable[[str], list[str]],
) -> None:
    found = {words: {*cell_hashes(compose(overrides_of(words)))} for words in HASHES}
    assert found == {words: {*names} for words, names in HASHES.items()}


def test_an_experiment_whose_name_had_its_heads_in_it_is_refused_with_the_words_for_it() -> None:
    for words, instead in (
        ("experiment=long_text_probed", "experiment=long_text heads=probed"),
        ("experiment=enwik8_transformer_xl", "experiment=enwik8 heads=transformer_xl"),
    ):
        with pytest.raises(UserError, match=f"{words}: write {instead}"):
            compose([words])


def test_heads_are_those_of_the_experiment_or_of_any() -> None:
    assert compose(["experiment=pg19", "heads=local"]).model.layers == 24
    assert compose(["experiment=pg19_baselines", "heads=local"]) == compose(
        ["experiment=pg19", "heads=local"]
    )
    assert compose(["experiment=pg19", "heads=full"]).model.layers == 22
    assert compose(["heads=full"]).model.base == "full"
    assert compose(["experiment=mqar", "heads=null"]) == compose(["experiment=mqar"])
    with pytest.raises(UserError, match="heads=t64: with experiment=pg19 heads is one of full,"):
        compose(["experiment=pg19", "heads=t64"])


def test_several_loggers_and_the_mode_of_wandb() -> None:
    logger = compose(["logger=[csv,wandb]", "logger.mode=offline"]).logger
    assert (logger.csv, logger.wandb, logger.tensorboard) == (True, True, False)
    assert logger.mode == "offline"
    assert compose([]).logger.wandb and not compose(["logger=jsonl"]).logger.wandb
    with pytest.raises(UserError, match=r"logger=wand \(did you mean 'wandb'\?\)"):
        compose(["logger=[csv,wand]"])
    for mode in ("auto", "online", "offline"):
        instead = f"logger={mode}: write logger=wandb logger.mode={mode}"
        with pytest.raises(UserError, match=instead):
            compose([f"logger={mode}"])


def test_an_option_of_trainer_wins_over_an_experiment_and_the_command_line_over_it() -> None:
    debug = compose(["experiment=enwik8", "trainer=debug", "trainer.val_every=2"])
    assert (debug.trainer.steps, debug.trainer.val_every) == (5, 2)
    assert (debug.hardware.compile, debug.logger.wandb) == (False, False)
    assert debug.trainer.batch_size == compose(["experiment=enwik8"]).trainer.batch_size
    assert compose(["trainer=overfit"]).trainer.overfit_batches == 1
    assert compose(["trainer=profile"]).trainer.profile == 10


def command_in(lines: list[str]) -> list[str]:
    """Return the overrides of the command in the header of a preset."""
    (line,) = (line for line in lines if line.startswith("# Command: rtx "))
    words = line.replace("<wiki.train.tokens>", "w").replace("<folder of books>", "b").split()
    overrides = []
    for word in words:
        is_remark = word.startswith("(") or word.endswith(":")
        if "=" in word and not is_remark:
            overrides.append(word)
    return overrides


@pytest.mark.parametrize("model", MODELS)
def test_a_model_writes_its_own_keys(model: str) -> None:
    has_baseline = compose([f"model={model}"]).routing.heads == 0
    assert has_baseline == (model in BASELINES)
    keys = keys_of("model", model)
    sizes = {"data.length"}
    if model not in BASELINES:
        sizes |= {f"routing.{key}" for key in ("heads", "layers", "window", "clusters")}
    if model == "encoder":
        sizes.add("routing.keys")  # K <- Q is a step of the left-to-right mask
    assert "model.window" in keys
    assert {key for key in keys if not key.startswith("model.")} == sizes


@pytest.mark.parametrize("model", MODELS)
def test_a_model_names_its_source_and_a_command(model: str) -> None:
    lines = header("model", model)
    titles = ["# Source: "]
    if model not in ("tiny", "modern", "recall", "encoder"):
        titles += ["# Score: ", "# The released code differs"]
    for title in titles:
        assert any(line.startswith(title) for line in lines), title
    check_overrides(command_in(lines))


@pytest.mark.parametrize("model", MODELS)
def test_the_command_of_a_model_fits_a_gpu_of_40_gib(model: str) -> None:
    composed = compose(command_in(header("model", model)))
    # The plan is for a GPU, whatever this machine has.
    config = with_values(composed, {"hardware.name": "gpu"})
    vocabulary = 267_735 if config.model.cutoffs else 256
    assert choose_micro_batch(config, vocabulary, 40 * 2**30).fits


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_as_published(model: str) -> None:
    config = compose([f"model={model}"])
    assert config == compose([f"model={model}", *SAID.get(model, "").split()])
    if model in SPARSE:
        assert cost(config, 256).parameters == pytest.approx(SPARSE[model], rel=0.01)


@pytest.mark.parametrize(
    "model", ["rt10", "rt12", "rt22", "rt24", "rt24-imagenet64", "rt12-cifar10"]
)
def test_a_model_of_the_paper_selects_algorithm_1(model: str) -> None:
    routing = compose([f"model={model}"]).routing
    assert (routing.selection, routing.keys, routing.logit_scale) == ("topk", "shared", "none")
    assert (routing.decay, routing.attend_self, routing.key_shift) == (0.999, True, 0)


def test_the_command_line_selects_another_algorithm_for_a_model_of_the_paper() -> None:
    published = compose(["model=rt24"]).routing
    config = compose(["model=rt24", "routing=causal"])
    chosen = config.routing
    assert (chosen.selection, chosen.keys, chosen.key_shift) == ("causal", "tied", 1)
    assert (chosen.heads, chosen.layers, chosen.window) == (
        published.heads,
        published.layers,
        published.window,
    )
    heads = "4 of 8 heads route in 24 of 24 layers"
    assert routing_lines(config)[0].startswith(f"routing=causal: {heads}")


@pytest.mark.parametrize("model", MODELS)
def test_topk_is_algorithm_1_with_every_model_and_none_has_no_routing_heads(model: str) -> None:
    base = compose([f"model={model}"]).model.base
    without = compose([f"model={model}", "routing=none"])
    assert (without.routing.heads, without.routing.layers) == (0, 0)
    words = [f"model={model}", "routing=topk"]
    if model in BASELINES:
        # As many as leave all patterns of model.base the same number of heads.
        words += [f"routing.heads={base.count('+') + 1}", "routing.layers=1"]
    if base == "recurrent":
        with pytest.raises(UserError, match=r"has no place beside model\.base=recurrent"):
            compose(words)
        return
    routing = compose(words).routing
    file = OmegaConf.load(conf_dir() / "routing" / "topk.yaml")
    assert isinstance(file, DictConfig)
    assert {key: getattr(routing, str(key)) for key in file} == OmegaConf.to_container(file)
    others = (routing.keys, routing.key_shift, routing.key_conv, routing.rotary, routing.merge)
    keys = "separate" if model == "encoder" else "shared"
    assert others == (keys, 0, 1, True, "mean")


ROUTINGS = [routing for routing in options("routing") if routing != "none"]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_selection_has_its_own_rules_and_a_run_says_where_it_has_others(routing: str) -> None:
    lines = routing_lines(compose(["model=tiny", f"routing={routing}"]))
    assert lines[0].startswith(f"routing={routing}: 2 of 4 heads route in 2 of 4 layers")
    said = {
        "topk": "sees the future, as in the paper; routing=causal does not",
        "exact": "all pairs",
        "indexer": "all pairs",
    }
    assert len(lines) == 1 + (routing in said) and said.get(routing, "") in lines[-1], lines
    changed = routing_lines(
        compose(["model=tiny", f"routing={routing}", "routing.logit_scale=unit"])
    )
    assert f"conf/routing/{routing}.yaml: routing.logit_scale=unit (there " in changed[-1]
    none = routing_lines(compose(["model=tiny", f"routing={routing}", "routing.heads=0"]))
    assert none == ["no head routes (routing.heads=0 routing.layers=2)"]


@pytest.mark.parametrize("experiment", options("experiment"))
def test_a_table_of_the_paper_says_its_command_score_cost_and_source(experiment: str) -> None:
    lines = header("experiment", experiment)
    if any(line.startswith("# Table") for line in lines):
        timed = experiment == "pg19_steps"
        work, then = ("python benchmarks/steps.py", "report") if timed else ("rtx train", "eval")
        for title in (
            f"# Command: {work} ",
            f"# Then: rtx {then} ",
            "# Score: ",
            "# Cost: ",
            "# Source: ",
        ):
            assert any(line.startswith(title) for line in lines), title
    if experiment in ("cifar10_grid", "cifar10", "wikitext103", "enwik8", "imagenet64", "pg19"):
        config = compose([f"experiment={experiment}"])
        assert config.name == config.data.name and config.routing.selection == "topk"
        assert (config.trainer.steps, config.model.window) == (200_000, 512)


def reduced(*overrides: str) -> Config:
    """The composed configuration with a small model and short sequences; all else stays as the
    preset has it.
    """
    config = compose(overrides)
    assert resolve(config) == config
    assert (config.routing.clusters or 0) * config.routing.window >= config.data.length
    images = config.data.name in IMAGE_SETS
    model = {
        "layers": 2,
        "hidden": config.model.heads * 4,
        "ffn_hidden": 24,
        "window": 8,
        "max_distance": 8,
    }
    model |= {"embedding": "adaptive" if config.model.cutoffs else config.model.embedding and 8}
    model |= {
        "stride": 4,
        "summary": 2,
        "cutoffs": config.model.cutoffs and "16x64",
        "band_factor": 2,
    }
    channels = 3 if images else 2
    model |= {"axes": config.model.axes and f"4x4x{channels}"}
    model |= {
        "memory": 12 if config.model.memory else 0,
        "compressed": 8 if config.model.compressed else 0,
    }
    model |= {"compression_rate": 2}
    routing = {"layers": min(config.routing.layers, 2), "window": 8, "clusters": 4, "block": 4}
    values = {
        "data.size": 4 if images else None,
        "data.length": 48 if images else 32,
        "trainer.batch_size": 2,
    }
    values |= {f"model.{key}": value for key, value in model.items()}
    if config.data.name in MADE:
        values |= {"data.pairs": 4, "data.distance": 0, "data.queries": 1}
    return resolve(
        with_values(config, values | {f"routing.{key}": value for key, value in routing.items()})
    )


def take_step(config: Config) -> None:
    """Take one step and check that it changes weights and centroids, and that everything stays
    finite.
    """
    torch.manual_seed(0)
    model = Transformer(config, 256).train()
    optimizer = build_optimizer(model, config.optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens_BN = torch.randint(0, 256, (2, config.data.length))
    if config.model.causal:
        nats_BN, auxiliary = model.loss(tokens_BN)
    else:
        nats_BN, _, auxiliary = model.answers(
            tokens_BN, torch.arange(config.data.length).expand(2, -1)
        )
    (nats_BN.mean() + auxiliary).backward()
    set_learning_rate(optimizer, learning_rate(config, 1))
    optimizer.step()
    after_step(model)
    after = model.state_dict()
    assert nats_BN.shape == (2, config.data.length)
    assert all(torch.isfinite(value).all() for value in after.values())
    output = "output_VS" if model.softmax is None else "softmax.bands.tables.1"
    assert not torch.equal(before[output], after[output])
    for module in model.modules():
        assert not isinstance(module, Centroids | Indexer) or int(module.steps) == 1


def selections_of(model: str) -> list[str]:
    """Return the words that choose each selection that a model can have."""
    names = [name for name in ROUTINGS if model != "encoder" or name in CLUSTERED]
    return [f"model={model} routing={name}" for name in names]


ROUTED = [words for model in MODELS if model not in BASELINES for words in selections_of(model)]
PLAIN = [f"model={model}" for model in MODELS]
OTHERS = [f"optimizer={name}" for name in options("optimizer")]


@pytest.mark.parametrize("words", [*PLAIN, *ROUTED, *OTHERS])
def test_presets_take_a_step(words: str) -> None:
    config = reduced(*words.split())
    _, _, routing = words.partition(" routing=")
    assert routing in ("", config.routing.selection)
    take_step(config)


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_cell_of_every_experiment(experiment: str) -> None:
    # Cells of other seeds differ in the seed alone.
    words = check_overrides([f"experiment={experiment}", "seed=0"], sweep=True)
    laid_out = [cell.overrides for cell in lay_out(words)]
    # Cells that differ by these alone are one at reduced size, or take the same step.
    sizes = ("routing.layers=", "routing.window=", "optimizer.lr=")
    alike = {tuple(word for word in cell if not word.startswith(sizes)): cell for cell in laid_out}
    assert len(alike) >= min(len(laid_out), 2)
    configs = [reduced(*cell) for cell in alike.values()]
    names = {word.removeprefix("heads=") for cell in alike for word in cell}
    assert experiment not in ("far_text", "mqar") or len(names.intersection(ROUTINGS)) > 3
    for cell, config in zip(alike.values(), configs, strict=True):
        for name in ROUTINGS:
            assert f"heads={name}" not in cell or config.routing.selection == name
    # Cells that are equal at reduced size take one step.
    distinct = {str(to_dict(config)): config for config in configs}
    for config in distinct.values():
        take_step(config)


@pytest.fixture
def presets(tmp_path: Path) -> Iterator[Path]:
    """A folder of the user's presets, as --config-dir adds it.

    Its test is the last one: it clears the compositions that all others share.
    """
    CONFIG_DIRS.append(tmp_path)
    forget()
    yield tmp_path
    CONFIG_DIRS.remove(tmp_path)
    forget()


def test_options_in_folders_are_composed_completed_and_listed(presets: Path) -> None:
    for path, text in (
        ("experiment/study/small", "defaults:\n  - smoke\n  - _self_\n\nname: small\n"),
        ("heads/study/small/wide", "model:\n  hidden: 320\n"),
    ):
        file = presets / f"{path}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# @package _global_\n# Of the user.\n{text}")
    forget()
    config = compose(["experiment=study/small", "heads=wide"])
    assert (config.name, config.trainer.steps, config.model.hidden) == ("small", 20, 320)
    assert candidates("rtx train experiment=st") == ["study/small "]
    assert "\n  study/small " in help.command_page("train", ["experiment"])
