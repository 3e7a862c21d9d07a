"""lm-evaluation-harness on a run that `rtx export format=hf` wrote: its scores are those of rtx."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_runs import ROOT, Workshop

for package in ("transformers", "lm_eval"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed", allow_module_level=True)

LENGTH = 192
"""Of the windows of the run, which the test split fits into."""
QUESTIONS = (
    {"question": "a bc", "choices": ["cab", "dad", "e"], "answer": 1},
    {"question": "abc abd", "choices": ["abe", "b", "fff"], "answer": 0},
    {"question": "f", "choices": ["ed", "ab cab", "c a"], "answer": 2},
)
CHOOSE = """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
"""
ROLL = """
task: roll
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
"""
WRITE = """
task: write
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
target_delimiter: ""
generation_kwargs: {until: ["<never>"], max_gen_toks: 12, do_sample: false}
metric_list:
  - metric: exact_match
"""


def written_tasks(folder: Path, text: str) -> Path:
    """Write the tasks and their data, and return their folder."""
    folder.mkdir()
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    texts = folder / "texts.jsonl"
    texts.write_text(json.dumps({"text": text}) + "\n")
    for name, task in {"choose": CHOOSE, "roll": ROLL, "write": WRITE}.items():
        task = task.replace("QUESTIONS", str(questions)).replace("TEXTS", str(texts))
        (folder / f"{name}.yaml").write_text(task)
    return folder


def harness_samples(model: Path, tasks: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the scores of the tasks, and the answers to each document, by task."""
    out = tasks / "out"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
    command += ["--model_args", f"pretrained={model},trust_remote_code=True"]
    command += ["--tasks", "choose,roll,write", "--include_path", str(tasks)]
    command += ["--batch_size", "2", "--output_path", str(out), "--log_samples"]
    # The harness may be in a folder that is in this process's path alone.
    paths = [str(ROOT), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "HF_HOME": str(tasks / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (results,) = out.rglob("results_*.json")
    samples = {}
    for task in ("choose", "roll", "write"):
        (path,) = out.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda line: line["doc_id"])
    return json.loads(results.read_text())["results"], samples


def test_the_harness_scores_chooses_and_writes_as_rtx(workshop: Workshop, tmp_path: Path) -> None:
    import torch

    from rtx import load
    from rtx.data.catalog import open_data
    from rtx.data.tokenizers import encode_text

    words = ("".join(letters) for letters in itertools.product("abcdef", repeat=3))
    (workshop.folder / "book.txt").write_text("a bc cab\n" + " ".join(words) * 4)
    steps = ("trainer.steps=3", "trainer.val_every=3")
    run = workshop.train("run", "routing=causal", f"data.length={LENGTH}", *steps)
    workshop.command("export", str(run), "format=hf")
    ours = load(run / "hf")
    tokens = open_data(ours.config.data, workshop.data).split("test")
    text = ours.tokenizer.decode(tokens.tolist()).decode()
    assert 100 < len(tokens) <= LENGTH
    scores, samples = harness_samples(run / "hf", written_tasks(tmp_path / "tasks", text))

    of_split, _ = workshop.score(run, "split=test", "mode=streaming")
    assert of_split["units"] == len(tokens)
    ((rolled,),) = samples["roll"][0]["resps"]
    assert float(rolled) == pytest.approx(-of_split["nats"], rel=1e-6)
    assert of_split["unit"] == "byte"
    assert scores["roll"]["bits_per_byte,none"] == pytest.approx(of_split["bits"], rel=1e-6)

    def nats_of(question: str, choice: str) -> float:
        asked = encode_text(ours.tokenizer, question)
        tokens_1N = torch.from_numpy(encode_text(ours.tokenizer, question + choice))[None]
        with torch.no_grad():
            nats_1N, _ = ours.model.loss(tokens_1N, streaming=True)
        return float(nats_1N[0, len(asked) :].sum())

    correct = []
    for line, sample in zip(QUESTIONS, samples["choose"], strict=True):
        likelihoods = [float(resps[0][0]) for resps in sample["resps"]]
        expected = [-nats_of(line["question"], f" {choice}") for choice in line["choices"]]
        assert likelihoods == pytest.approx(expected, abs=1e-5)
        correct.append(max(range(3), key=expected.__getitem__) == line["answer"])
    assert scores["choose"]["acc,none"] == pytest.approx(sum(correct) / 3)
    for line, sample in zip(QUESTIONS, samples["write"], strict=True):
        ((written,),) = sample["resps"]
        whole = ours.sample(12, line["question"], temperature=0)
        assert line["question"] + written == whole
