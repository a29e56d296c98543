"""Of a long list of prompts a run encodes those that it draws, once; what is kept is checked when it is read."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from commands import call
from safetensors import SafetensorError

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.models import inputs, prompt_embeds
from chunk_grpo.models.families import FluxPolicy
from chunk_grpo.training import trainer
from chunk_grpo.training.state import TrainingState

SMALL = {
    "iterations": 3,
    "prompts_per_iteration": 2,
    "images_per_prompt": 2,
    "steps": 3,
    "chunks": "1,1",
    "threads": 1,
    "eval_count": 2,
    "eval_steps": 1,
    "hybrid_split": 1,
    "eval_every": 0,
    "eval_rewards": [],
    "reward": "tiny_rewards:red",
}


@pytest.fixture
def encoded(monkeypatch, tmp_path):
    """The prompts that were encoded, in a store of the test's own."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path / "cache"))
    found, embed = [], FluxPolicy.embed

    def watched(self, pipe, prompts):
        found.extend(prompts)
        return embed(self, pipe, prompts)

    monkeypatch.setattr(FluxPolicy, "embed", watched)
    return found


def test_a_run_on_20000_prompts_encodes_those_it_draws(encoded, tmp_path):
    """Six of twenty thousand, and two of a hundred held out; when it goes on, only what is new."""
    (tmp_path / "train.txt").write_text("".join(f"a red star {i}\n" for i in range(20_000)))
    (tmp_path / "test.txt").write_text("".join(f"a blue square {i}\n" for i in range(100)))
    files = {"prompts": str(tmp_path / "train.txt"), "eval_prompts": str(tmp_path / "test.txt")}
    (tmp_path / "run").mkdir()
    for iterations, wanted in ((3, 3 * 2 + 2), (3, 0), (4, 2)):
        encoded.clear()
        run_settings = settings.load_settings(
            "pocket/tiny", SMALL | files | {"iterations": iterations}
        )
        trainer.train_run(run_settings, tmp_path / "run")
        assert len(encoded) == len(set(encoded)) == wanted
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 10


@pytest.mark.parametrize("field", ["prompts", "eval_prompts"])
def test_a_prompt_that_the_reward_cannot_score_is_found_before_anything_is_done(field, tmp_path):
    """Wherever it stands in the list, and before there is a folder."""
    few = tmp_path / "few.txt"
    odd = tmp_path / "odd.txt"
    few.write_text("a red star\n" * 40)
    odd.write_text("a red star\n" * 40 + "zebras fly over the moon\n")
    words = [
        "train",
        "pocket/tiny",
        "reward=pocket-geneval",
        f"prompts={few}",
        f"eval_prompts={few}",
    ]
    done = call(*words, f"{field}={odd}", "--out", tmp_path / "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = done.stderr.splitlines()
    assert (
        f"`{field}` must hold prompts that the reward pocket-geneval can score; prompt 41 cannot be scored"
        in line
    )


def test_processes_share_the_prompts(monkeypatch, tmp_path):
    """Together they need what one alone needs, and no prompt of an iteration is needed twice."""
    run_settings = settings.load_settings(
        "pocket/tiny", SMALL | {"prompts_per_iteration": 4, "eval_count": 6}
    )

    def needed(rank, processes):
        accelerator = type("A", (), {"process_index": rank, "num_processes": processes})
        texts = [f"train {i}" for i in range(1000)], [f"test {i}" for i in range(50)]
        return TrainingState(
            run_settings, tmp_path, accelerator, *texts, {}, {}, None
        ).needed_prompts()

    alone = needed(0, 1)
    parts = [needed(rank, 4) for rank in range(4)]
    assert set().union(*parts) == set(alone) and len(alone) == 3 * 4 + 6
    assert all(sum(text.startswith("train") for text in part) == 3 for part in parts)


def flip(file, bit):
    """Another bit, counted from the end where it is negative."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


HARM = {
    "cut": lambda file, other: file.write_bytes(file.read_bytes()[:-5]),
    "cut head": lambda file, other: file.write_bytes(file.read_bytes()[:20]),
    "empty": lambda file, other: file.write_bytes(b""),
    "text": lambda file, other: file.write_text("?" * 500),
    "flipped": lambda file, other: flip(file, -3),
    "of another": lambda file, other: shutil.copy(other, file),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_kept_embedding_that_is_damaged_is_made_again(monkeypatch, tmp_path, capsys, harm):
    """With one warning, and from then on it is whole."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path))
    calls = []

    def encode(group):
        calls.extend(group)
        rows = torch.tensor([[[float(len(p))] * 4] * 3 for p in group], dtype=torch.bfloat16)
        return {"prompt_embeds": rows, "mask": rows[..., 0] > 0}

    prompts = ["a cat", "a red star", "two dogs"]
    before = prompt_embeds._load_prompt_embeds(prompts, "key", encode)
    paths = prompt_embeds.cache_prompt_embeds(prompts, "key", encode)
    HARM[harm](paths["a cat"], paths["a red star"])
    for wanted in (["a cat"], []):
        calls.clear()
        after = prompt_embeds._load_prompt_embeds(prompts, "key", encode)
        assert calls == wanted and all(torch.equal(after[k], before[k]) for k in before)
        said = capsys.readouterr().out
        assert said.count("\n") == len(wanted) and said.startswith(
            "warning: prompts: " * len(wanted)
        )
    assert paths["a cat"].name not in said


def test_no_bit_of_a_kept_embedding_can_flip_unseen(tmp_path):
    """Of its length, its head or its tensors; only the spaces that fill up the head mean nothing."""
    file = tmp_path / "a.safetensors"
    prompt_embeds._save_prompt_embeds(
        file, {"embeds": torch.ones(3), "mask": torch.ones(4, dtype=bool)}, "a cat", "k"
    )
    unseen = 0
    for bit in range(0, 8 * file.stat().st_size, 3):
        flip(file, bit)
        with contextlib.suppress(InputError):
            row, unseen = prompt_embeds._read_prompt_embeds(file, "a cat", "k"), unseen + 1
            assert row["embeds"].tolist() == [1.0] * 3 and row["mask"].tolist() == [True] * 4
        flip(file, bit)
    assert unseen < 20


def test_a_cache_of_several_users_can_be_read_by_each_and_trimmed_by_two_at_once(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path))

    def encode(group):
        return {"embeds": torch.tensor([[float(len(p))] for p in group])}

    prompts = ["a cat", "a red star", "two dogs"]
    paths = prompt_embeds.cache_prompt_embeds(prompts, "key", encode)
    for path in paths.values():
        assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o666

    # The files belong to another user, who alone may set their times.
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", deny)
        rows = prompt_embeds._load_prompt_embeds(prompts, "key", encode)
        assert rows["embeds"].flatten().tolist() == [5.0, 10.0, 8.0]

    for path in paths.values():
        os.utime(path, (0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", deny)
        assert prompt_embeds.trim_prompt_cache(0) == 0

    # Another run removes a file after this one has listed the folder.
    stat = Path.stat

    def stat_after_removal(path, **options):
        if path == paths["a cat"]:
            path.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat_after_removal)
    assert prompt_embeds.trim_prompt_cache(0) == 2
    assert not any(path.exists() for path in paths.values())


@pytest.mark.parametrize("mode", [0o755, 0o2775, 0o1777])
def test_all_who_may_write_to_the_cache_can_add_prompts_of_a_model(monkeypatch, tmp_path, mode):
    """Whatever the umask of the user who encodes the first prompt."""
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path))
    tmp_path.chmod(mode)
    before = os.umask(0o022)
    try:
        (path,) = prompt_embeds.cache_prompt_embeds(
            ["a cat"], "key", lambda group: {"embeds": torch.ones(1, 2)}
        ).values()
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o7777 for folder in path.parents[:2]] == [mode, mode]
    assert path.stat().st_mode & 0o777 == mode & 0o666


@pytest.mark.parametrize("denied", ["mkdir", "replace", "save_file"])
def test_a_cache_that_cannot_be_written_is_one_sentence_with_its_variable(
    monkeypatch, tmp_path, denied
):
    monkeypatch.setenv("CHUNK_GRPO_CACHE", str(tmp_path))
    if denied == "mkdir":
        monkeypatch.setattr(Path, "mkdir", deny)
    elif denied == "replace":
        monkeypatch.setattr(os, "replace", deny)
    else:

        def refuse(rows, file, metadata):
            raise SafetensorError("I/O error: Permission denied (os error 13)")

        monkeypatch.setattr(prompt_embeds, "save_file", refuse)
    with pytest.raises(InputError, match="variable CHUNK_GRPO_CACHE must name a folder that can"):
        prompt_embeds.cache_prompt_embeds(
            ["a cat"], "key", lambda group: {"embeds": torch.ones(1, 2)}
        )
    assert not [*tmp_path.rglob("*.part")]


def deny(*arguments, **options):
    """Fail as the system does for a file of another user."""
    raise PermissionError(1, "Operation not permitted")


LISTS = {  # as they are published: HPDv2, PartiPrompts, DrawBench, GenEval
    "train.json": (
        '[{"human_preference": [1, 0], "prompt": "a cat", "image_path": ["a.jpg", "b.jpg"]}, '
        '{"human_preference": [0, 1], "prompt": "a cat", "image_path": ["c.jpg", "d.jpg"]}, '
        '{"human_preference": [0, 1], "prompt": "a dog", "image_path": ["e.jpg", "f.jpg"]}]',
        ["a cat", "a dog"],
    ),
    "anime.json": ('["a knight", "a fox"]', ["a knight", "a fox"]),
    "PartiPrompts.tsv": (
        "Prompt\tCategory\tChallenge\tNote\nbond\tAbstract\tBasic\tBiology\n300\tAbstract\tBasic\t\n",
        ["bond", "300"],
    ),
    "drawbench.csv": (
        '"Prompts","Category"\r\n"A red colored car.","Colors"\r\n"One, two, ""three"".","Counting"\r\n',
        ["A red colored car.", 'One, two, "three".'],
    ),
    "from-excel.csv": ("\ufeffPrompts,Category\na cat,Colors\n", ["a cat"]),
    "evaluation_metadata.jsonl": (
        '{"tag": "single_object", "include": [], "prompt": "a photo of a bench"}\n',
        ["a photo of a bench"],
    ),
    "separators.jsonl": ('{"prompt": "a cat\u2028and\x85a dog"}\r\n', ["a cat\u2028and\x85a dog"]),
}


@pytest.mark.parametrize("name", LISTS)
def test_published_lists_are_read_as_they_come(name, tmp_path):
    text, prompts = LISTS[name]
    (tmp_path / name).write_bytes(text.encode())
    assert inputs.read_prompts(str(tmp_path / name)) == prompts


@pytest.mark.parametrize(
    "name, text, word",
    [
        ("a.csv", "text,id\na cat,1\n", "column Prompt"),
        ("a.tsv", "", "column Prompt"),
        ("a.json", '{"prompt": "x"}', "JSON list"),
        ("a.json", "[{}]", "JSON list"),
        ("a.json", "[", "JSON list"),
        ("a.csv", "prompt\n,\n", "holds no prompt"),
        ("a.json", "[1, 2]", "entry 1 must be a text; it is 1"),
        (
            "a.txt",
            "a cat\n" + "x" * 10**7,
            "has a prompt of 10000000 characters in line 2; at most 10000 are allowed",
        ),
    ],
)
def test_other_forms_are_refused_in_a_sentence(name, text, word, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=word):
        inputs.read_prompts(str(tmp_path / name))
