"""From overrides to a checked configuration: what fits with what, keys that nothing reads, plain
values and back.
"""

import re
from pathlib import Path

import pytest

from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.identity import cell_hashes, config_hash
from rtx.settings.overrides import check_overrides
from rtx.settings.rules import resolve
from rtx.settings.run_config import load_run_config, merge, to_yaml
from rtx.settings.schema import Config, LoggerConfig, all_fields, to_config, to_dict, with_values
from rtx.sweeps.cells import lay_out

HASHES = {
    "": ("329f75f421df", "329f75f421df"),
    "data=enwik8 model=rt24": ("a1934cb6524a", "a1934cb6524a"),
    "experiment=cifar10 seed=3": ("4041088e38d3", "4041088e38d3"),
    "experiment=recall routing=blocks routing.block=4": ("bb24b843b735", "ee225e69f875"),
    "model=rt22 optimizer.lr=1e-2 data=pg19": ("b8d4a1d95bb1", "b8d4a1d95bb1"),
}
"""The hash, and the former hash, by which cells that were trained before must be found again by the
same words.
"""

ENCODER = "data.name=masked data.keys=99 model.causal=false"
RECURRENT = "model.base=recurrent routing.heads=0"
COMPRESSIVE = f"{RECURRENT} model.memory=32 model.compressed=24 model.compression_rate=4"


def test_a_command_line_wins_over_presets_and_a_later_group_over_an_earlier() -> None:
    assert compose(["model=tiny", "optimizer=adafactor"]).optimizer.name == "adafactor"
    assert compose(["optimizer=adam", "model=rt22"]).optimizer.name == "adam"
    assert compose(["model=rt22"]).optimizer.name == "adafactor"
    paper = compose(["model=rt24", "data=enwik8", "routing.window=128", "data.length=4096"])
    assert (paper.data.length, paper.routing.window, paper.routing.heads) == (4096, 128, 4)
    smoke = compose(["experiment=smoke", "trainer.batch_size=2"])
    assert (smoke.name, smoke.trainer.steps, smoke.trainer.batch_size) == ("smoke", 20, 2)
    assert compose(["experiment=null", "experiment=smoke"]).name == "smoke"
    assert compose(["experiment=smoke", "experiment=null"]) == compose([])
    assert compose(["optimizer.steps=7"]).trainer.steps == 7
    assert compose(["routing=topk", "model=rt24"]).routing.logit_scale == "none"


def test_images_fix_the_length_whatever_a_model_writes_and_the_command_line_wins() -> None:
    lengths = {
        "data=cifar10": 3072,
        "data=cifar10 model=rt24": 3072,
        "data=cifar10 data.size=16": 768,
    }
    lengths |= {
        "data=imagenet64": 12288,
        "data=images data.path=cats": 3072,
    }  # model=tiny writes 256
    assert {words: compose(words.split()).data.length for words in lengths} == lengths
    with pytest.raises(UserError, match=r"data\.length=256 must be 3072 = 32 x 32 x 3"):
        compose(["data=cifar10", "data.length=256"])


def test_plain_values_and_back(tmp_path: Path) -> None:
    default = compose([])
    assert resolve(to_config(to_dict(default))) == default
    small = compose(
        ["optimizer.lr=1e-5", "trainer.max_minutes=1e-3", "name=1e3", "logger.group='a: [b'"]
    )
    for config in (default, small, compose(['name="null"', "hardware.compile=true"])):
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert load_run_config(tmp_path) == config
    for name in (
        "007",
        "-0",
        "1e3",
        "0x10",
        "true",
        "${oc.env:HOME}",
    ):  # a text is taken as it is written
        (tmp_path / "config.yaml").write_text(
            to_yaml(default).replace("\nname: rtx\n", f"\nname: {name}\n")
        )
        assert load_run_config(tmp_path).name == name


@pytest.mark.parametrize(
    ("name", "logger"),
    [
        ("auto", LoggerConfig(wandb=True)),
        ("offline", LoggerConfig(wandb=True, mode="offline")),
        ("csv", LoggerConfig(csv=True)),
        ("jsonl", LoggerConfig()),
    ],
)
def test_the_logger_of_a_run_of_version_0_4(
    tmp_path: Path, name: str, logger: LoggerConfig
) -> None:
    (tmp_path / "config.yaml").write_text(f"logger:\n  name: {name}\n  project: rtx\n")
    assert load_run_config(tmp_path).logger == logger


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not the configuration of a run"),
        ("eval: {split: test}\n", "config.yaml: unknown key 'eval.split'"),
        ("data: {length: {a: 1}}", "data.length must be a value, and not a section"),
        ("? {a: 1}\n: 2", "a name must be a text"),
        ("5", "must be a section"),
        ("seed: [1, 2]", "seed must be a value or a section"),
        ("seed: 1\ndata: {", "config.yaml: not valid YAML: while parsing"),
        ("data:\n  lenght: 3\n", "unknown key 'data.lenght' (did you mean 'data.length'?)"),
        ("data:\n  length: three\n", "config.yaml: data.length=three: must be an integer"),
        ("\udcff\x00", "can't decode byte"),
    ],
)
def test_a_damaged_configuration_of_a_run(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        load_run_config(tmp_path)
    assert said in str(caught.value) and len(str(caught.value)) < 1000
    assert all(line.startswith(str(tmp_path)) for line in str(caught.value).splitlines())


def test_merge_takes_keys_and_groups_and_checks_them() -> None:
    default = compose([])
    merged = merge(
        default, ["hardware.threads=2", "hardware=cpu", "data.length=512", "logger=jsonl", "seed=3"]
    )
    assert (merged.hardware.name, merged.hardware.threads, merged.data.length) == ("cpu", 2, 512)
    assert (merged.logger.wandb, merged.seed) == (False, 3)
    assert merge(default, []) == default
    with pytest.raises(UserError, match=r"name=\$\{oc\.env:HOME\}: a run takes no references"):
        merge(default, ["name=${oc.env:HOME}"])
    with pytest.raises(UserError, match=r"routing\.window=64 must be at most data\.length=32"):
        merge(default, ["data.length=32"])


def test_the_hash_tells_cells_apart_by_what_changes_results() -> None:
    reference = config_hash(default := compose([]))
    assert len(reference) == 12
    same = "name=other logger.group=g hardware.workers=2 model.name=mine data.verify=never"
    same += (
        " trainer.checkpoint_every=7 trainer.micro_batch_size=2 model.recompute=true "
        "trainer.profile=3"
    )
    same += " hardware.compile=false"
    assert config_hash(compose(same.split())) == reference
    others = (
        "seed=1",
        "routing.window=32",
        "trainer.steps=5",
        "hardware.threads=1",
        "optimizer.lr=0.1",
        "hardware.products=torch",
        "model.ffn_parts=2",
    )
    assert len({reference, *(config_hash(compose([word])) for word in others)}) == 8
    assert (
        compose(["seed=1"]) != compose([]) == default
    )  # a later cell of the same groups knows nothing of an earlier
    # Up to version 0.4 this key told no cells apart.
    assert cell_hashes(compose(["hardware.products=torch"]))[1] == reference
    for words, recorded in HASHES.items():
        assert cell_hashes(compose(words.split())) == tuple(dict.fromkeys(recorded)), words


def test_the_hash_knows_the_folder_that_a_path_counts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config_hash(compose(words := ["data=text", "data.path=book.txt"]))
    monkeypatch.chdir(tmp_path)
    assert (
        before
        != config_hash(compose(words))
        == config_hash(compose([words[0], f"data.path={tmp_path}/book.txt"]))
    )


def changed(words: str) -> Config:
    """Return the schema's own defaults with the values of some words."""
    values = {}
    for word in words.split():
        key, _, text = word.partition("=")
        values[key] = all_fields()[key].read_word(text)
    return with_values(Config(), values)


def test_clusters_and_hash_buckets_are_frozen() -> None:
    for words, frozen in (
        ("", (4, None)),  # 1024 / 256
        ("routing.clusters=9", (9, None)),
        ("model.base=lsh+local", (4, 8)),  # 2 * 1024 / 256
        ("model.base=lsh model.hash_buckets=30", (4, 30)),
    ):
        resolved = resolve(changed(words))
        assert (resolved.routing.clusters, resolved.model.hash_buckets) == frozen
        assert resolve(resolved) == resolved and Config().routing.clusters is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "routing.selection=exact",
            "routing.selection=exact needs routing.keys=separate or tied, not shared;",
        ),
        (
            "routing.selection=random routing.keys=projected",
            "routing.keys=projected needs routing.selection=causal",
        ),
        ("routing.key_shift=1", "needs routing.key_shift=0 and routing.key_conv=1"),
        (
            "routing.keys=tied routing.key_loss=1",
            "routing.key_loss is for routing.keys=separate or projected, not for",
        ),
        (
            "routing.selection=blocks routing.keys=separate routing.block=300",
            "must be at most routing.window=256",
        ),
        ("model.window=2000", "model.window=2000 must be at most data.length=1024"),
        (
            "model.base=fixed model.summary=129",
            "model.summary=129 must be at most model.stride=128",
        ),
        (
            "model.base=local+local+lsh",
            "needs in every layer a multiple of 3 heads that do not route",
        ),
        *(
            (
                f"model.positions=axial model.axes={axes}",
                f"model.axes={axes} must have the product data.length=1024",
            )
            for axes in ("32x33", "32*32", "-32x-32", "1024x", "")
        ),
        (
            "model.hash_buckets=7",
            "model.hash_buckets=7 must be even: a rotation and its opposite give two buckets",
        ),
        (
            "model.hidden=250 model.positions=none",
            "model.hidden=250 must be a multiple of model.heads=8",
        ),
        (
            "model.hidden=264",
            "model.positions=rotary needs an even head size, not hidden/heads = 33",
        ),
        (
            "hardware.name=cpu hardware.precision=tf32",
            "hardware.precision=tf32 needs a GPU; a CPU takes",
        ),
        (
            "hardware.devices=2",
            "hardware.devices and nodes above 1 need hardware=ddp or fsdp, not hardware=auto",
        ),
        (
            "hardware.name=fsdp hardware.compile=true",
            "hardware.compile=true is not for hardware=fsdp",
        ),
        (
            "hardware.name=cpu hardware.graphs=true",
            "hardware.graphs=true needs a GPU; take",
        ),
        (
            "hardware.graphs=true hardware.name=ddp",
            "hardware.graphs=true is not for hardware=ddp or fsdp",
        ),
        (
            "hardware.name=cpu hardware.loss=liger",
            "hardware.loss=liger needs a GPU; take",
        ),
        (
            "hardware.loss=liger data.name=recall",
            "hardware.loss=liger is not for data=recall, where answers alone",
        ),
        (
            "hardware.loss=liger hardware.precision=fp64",
            "is not for hardware=fsdp or hardware.precision=fp64",
        ),
        (
            "hardware.loss=liger model.embedding=adaptive model.cutoffs=2x5",
            "is not for model.embedding=adaptive",
        ),
        (
            "hardware.attention=native hardware.precision=bf16-true",
            "hardware.attention=native is for",
        ),
        (
            "hardware.name=fsdp optimizer.name=adafactor",
            "optimizer=adafactor is not for hardware=fsdp",
        ),
        (
            "hardware.attention=native hardware.name=gpu",
            "hardware.attention=native is for hardware.precision=fp32 on",
        ),
        ("hardware.attention=native model.positions=shaw", "need hardware.attention=auto or torch"),
        (
            "trainer.batch_size=10 trainer.micro_batch_size=4",
            "trainer.batch_size=10 must be a multiple of",
        ),
        ("optimizer.warmup=0", "optimizer.schedule=rsqrt needs optimizer.warmup of at least 1"),
        ("data.name=images data.path=a", "data.length=1024 must be height x width x 3"),
        (
            "data.name=cifar10 data.length=3072 trainer.val_stride=1024",
            "has no place in data=cifar10, whose sequences",
        ),
        ("data.name=recall data.pairs=17", "data.pairs=17 must be at most data.keys=16"),
        (
            "data.name=recall data.pairs=16 data.length=63 routing.window=8 model.window=8",
            "of at least 64, not 63",
        ),
        (
            "data.name=mqar data.pairs=300 data.keys=400",
            "data.pairs=300 needs data.length of at least 1200, not",
        ),
        ("data.name=induction data.pairs=17", "data.pairs=17 must be at most data.keys=16"),
        (
            "data.name=copy data.pairs=100 data.distance=1000",
            "=1000 need data.length of at least 1202, not 1024",
        ),
        ("model.base=recurrent+local", "recurrent heads take no others beside them"),
        ("model.base=recurrent", " has no place beside model.base=recurrent"),
        (
            f"{RECURRENT} model.positions=learned",
            "model.positions=learned has no place in model.base=recurrent",
        ),
        (
            f"{RECURRENT} model.memory=40 hardware.compile=true",
            "hardware.compile=true is not for model.memory=40",
        ),
        (
            f"{RECURRENT} model.same_length=true",
            "model.same_length=true needs model.memory of at least 1",
        ),
        (
            f"{RECURRENT} model.memory=40 data.name=recall",
            "model.memory=40 needs a text that goes on",
        ),
        (
            f"{RECURRENT} model.compressed=24",
            "model.compressed=24 needs model.memory of at least 1",
        ),
        (
            f"{COMPRESSIVE} model.memory=30",
            "model.memory=30 must be a multiple of model.compression_rate=4",
        ),
        (
            f"{COMPRESSIVE} data.length=1022",
            "data.length=1022 must be a multiple of model.compression_rate=4",
        ),
        *(
            (
                f"model.embedding=adaptive model.cutoffs={cutoffs}",
                f"model.cutoffs={cutoffs} must be ascending numbers",
            )
            for cutoffs in ("5x2", "null")
        ),
        (
            "model.embedding=adaptive model.cutoffs=2x5 model.band_factor=99",
            "at least model.band_factor=99^2 = 9801",
        ),
        (
            f"{RECURRENT} data.documents=true",
            "data.documents=true is not for model.base=recurrent, which goes on from segment to",
        ),
        *(
            (
                f"data.documents=true hardware.{key}=true",
                f"hardware.{key}=true is not for data.documents=true",
            )
            for key in ("compile", "graphs")
        ),
        (
            "model.causal=false",
            "model.causal=false needs data=masked, not stdlib, of which an encoder",
        ),
        *(
            (f"{ENCODER} {words}", said)
            for words, said in (
                (
                    "model.base=recurrent routing.heads=0",
                    "is for model.base of local, full, lsh, adaptive_span, strided, fixed, fixed",
                ),
                (
                    "model.positions=shaw",
                    "model.positions=shaw needs model.causal=true; take rotary",
                ),
            )
        ),
        ("name=a/b", "name='a/b' must be a folder's name"),
        (f"name={'x' * 201}", "must be a folder's name, of at most 200 bytes"),
    ],
)
def test_what_does_not_fit(words: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        resolve(changed(words))
    assert "\n" not in str(caught.value)


def test_what_fits() -> None:
    for words in (
        "routing.heads=0 routing.window=2000",  # nothing routes, so its window does not matter
        "model.base=strided+fixed model.window=2000 model.summary=128",
        "model.positions=axial model.axes=32x16x2",
        "hardware.attention=native routing.merge=lse",
        "hardware.name=auto hardware.precision=tf32",  # known to be wrong only once the device is
        "data.name=cifar10 data.length=3072 trainer.val_stride=3072",
        "data.name=images data.path=cats data.length=2100",
    ):
        unset = {"routing.clusters": None, "routing.attend_self": None}
        assert with_values(resolve(changed(words)), unset) == changed(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "data.path=book.txt",
            "data.path=book.txt has no effect with data.name=stdlib; it is for text, enwik8,",
        ),
        (
            "data.size=16",
            "data.size=16 has no effect with data.name=stdlib; it is for cifar10, imagenet64, "
            "images",
        ),
        (
            "data=cifar10 data.tokenizer=words",
            "data.tokenizer=words has no effect with data.name=cifar10",
        ),
        (
            "data.vocabulary=500",
            "data.vocabulary=500 has no effect with data.tokenizer=bytes; it is for sentencepiece",
        ),
        (
            "routing=blocks_random routing.compressed=true",
            "has no effect with routing.selection=blocks_random; it is",
        ),
        (
            "routing.block=8",
            "routing.block=8 has no effect with routing.selection=causal; it is for blocks",
        ),
        (
            "routing=exact routing.decay=0.5",
            "routing.decay=0.5 has no effect with routing.selection=exact",
        ),
        (
            "model.memory=40",
            "model.memory=40 has no effect with model.base=local; it is for recurrent",
        ),
        (
            "model.cutoffs=2x5",
            "model.cutoffs=2x5 has no effect with model.embedding=null; it is for adaptive",
        ),
        (
            "model.stride=8",
            "model.stride=8 has no effect with model.base=local; it is for strided, fixed",
        ),
        (
            "optimizer=adafactor optimizer.beta1=0.5",
            "optimizer.beta1=0.5 has no effect with optimizer.name=adafactor",
        ),
        (
            "model.max_distance=8",
            "model.max_distance=8 has no effect with model.positions=rotary; it is for shaw",
        ),
        (
            "data=mqar data.documents=true",
            "data.documents=true has no effect with data.name=mqar; it is for stdlib, text,",
        ),
        (
            "logger=jsonl logger.project=x",
            "logger.project=x has no effect with logger.wandb=false; it is for true",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_refused(words: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        compose(words.split())
    with pytest.raises(UserError, match=re.escape(said)):
        merge(compose(words.split()[:-1]), words.split()[-1:])


def test_a_key_that_something_reads_is_not_nor_one_that_some_cell_reads() -> None:
    for words in (
        "model.axes=null",
        "routing.heads=0 routing.window=8",
        "data=enwik8 data.fetch=archive",
        "model.base=local+fixed model.stride=8",
    ):
        compose(words.split())
    merge(
        resolve(changed("data.newlines=drop")), ["seed=1"]
    )  # what a file says in vain hurts nobody
    elsewhere = compose(["experiment=recall", "data=text", "data.path=book.txt"])
    assert (elsewhere.data.name, elsewhere.data.keys, elsewhere.routing.window) == ("text", 8, 16)
    both = ["routing=blocks,causal", "routing.block=8,16", "model.heads=4"]
    assert (
        len(lay_out(check_overrides(both, sweep=True))) == 3
    )  # causal reads no routing.block: one cell
    with pytest.raises(
        UserError, match=r"routing\.block=8 has no effect with routing\.selection=topk"
    ):
        lay_out(check_overrides(["routing=topk,causal", "routing.block=8,16"], sweep=True))
