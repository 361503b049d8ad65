"""`DatasetTask`: rows of a file as prompts, and what is wrong with a file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from loom.errors import WrongArguments
from loom.rl.dataset import DatasetTask, read_rows
from loom.rl.prompts import Prompt
from loom.rl.task import prompt_tokens

ROWS = [{"question": f"{one}+1=", "answer": str(one + 1)} for one in range(5)]


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "train.jsonl"
    where.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return where


def test_each_pass_has_every_row_once_and_a_step_can_be_made_again(path: Path) -> None:
    task = DatasetTask(path, [exact], prompt="question")

    steps = [task.prompts(step, 2) for step in range(5)]

    first, second = ([one.data["answer"] for pair in steps for one in pair][at : at + 5] for at in (0, 5))
    assert sorted(first) == sorted(second) == ["1", "2", "3", "4", "5"]
    assert first != second
    assert pickle.loads(pickle.dumps(task)).prompts(3, 2) == steps[3]
    assert steps[0][0] == Prompt(steps[0][0].data["question"], steps[0][0].data)


def test_a_system_message_makes_a_chat_and_a_function_makes_a_prompt(path: Path) -> None:
    task = DatasetTask(
        path, [exact], prompt=lambda row: f"What is {row['question']}", system="Add.", evaluation=path
    )

    (prompt, *_) = task.evaluation()

    assert prompt.content == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "What is 0+1="},
    ]
    assert prompt.text == "What is 0+1="


def test_a_chat_needs_a_tokenizer_with_a_template() -> None:
    class Letters:
        eos, pad, size = 0, 1, 256

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, tokens: object) -> str:
            return ""

    chat = Prompt([{"role": "user", "content": "a"}])

    assert prompt_tokens(Prompt("ab"), Letters()) == [97, 98]
    with pytest.raises(WrongArguments, match="the tokenizer has no chat template"):
        prompt_tokens(chat, Letters())


def test_parquet_files_and_saved_datasets_have_the_same_rows(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "rows.parquet")
    folder = tmp_path / "saved" / "train"  # as `datasets` saves it: a stand-in, written by pyarrow alone
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    with ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)

    assert read_rows(str(tmp_path / "rows.parquet")) == ROWS
    assert read_rows(str(folder)) == ROWS
    with pytest.raises(WrongArguments, match="it has the splits train: name one of these folders"):
        read_rows(str(folder.parent))


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.jsonl", '{"prompt": "a"}\n{"prompt":', r"line 2 of .*a.jsonl is no JSON"),
        ("a.jsonl", "[1]\n", r"line 1 of .*a.jsonl is no JSON object: \[1\]"),
        ("a.jsonl", "\n", "has no rows"),
        ("a.csv", "prompt\n", "is no dataset: JSON lines, Parquet"),
        ("a.parquet", "PAR0", "is no Parquet file"),
        ("a.jsonl", '{"question": "a", "answer": 1}\n', "has no column prompt; it has question, answer"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}\n', "a prompt is a text, or messages with role and content"),
        ("a.jsonl", '{"prompt": 7}\n', "a prompt is a text, or messages"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, text: str, why: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(text)

    with pytest.raises(WrongArguments, match=why):
        DatasetTask(tmp_path / name, [exact]).prompts(0, 1)


def test_a_file_that_is_not_there_and_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongArguments, match=r"there is no dataset .*gone.jsonl on the orchestrator's host"):
        DatasetTask(tmp_path / "gone.jsonl", [exact]).prompts(0, 1)
    with pytest.raises(WrongArguments, match="2 weights for 1 reward functions"):
        DatasetTask(tmp_path / "gone.jsonl", [exact], weights=[1, 2])
