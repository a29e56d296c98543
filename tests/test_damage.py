"""Checkpoints and run files that were cut, mixed up or edited: refused in words or fallen back from, none is used."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import synthetic
import torch
from safetensors.torch import load_file, save_file

from chunk_grpo import InputError
from chunk_grpo.core import settings
from chunk_grpo.core.files import RunInfo, append_json_line, hash_files, read_json, write_json
from chunk_grpo.evaluation import parts, run_images
from chunk_grpo.models import trainable
from chunk_grpo.runs import run_folder
from chunk_grpo.training import checkpoints, resuming
from chunk_grpo.training.state import TrainingState


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left():
    """Weights in parts open a group of processes, here of one."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class State(SimpleNamespace):
    """As much of a training state as checkpoints ask for."""

    @property
    def identity(self) -> dict:
        note = (
            read_json(self.run / "run.json", RunInfo) if (self.run / "run.json").is_file() else {}
        )
        return {"run_id": note.get("run_id", ""), "settings": self.settings.model_dump(mode="json")}


def fresh(run: Path, kind: str) -> State:
    """A state before its first iteration."""
    torch.manual_seed(0)
    net = torch.nn.Module()
    net.layers, net._repeated_blocks = (
        torch.nn.ModuleList([torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)]),
        ["Linear"],
    )
    sharded = kind == "parts"
    trained = (
        trainable.shard_model(net, torch.device("cpu"), torch.float32)
        if sharded
        else list(net.parameters())
    )
    run_settings = settings.load_settings(
        "pocket/tiny", {"keep_checkpoints": 3, "sharding": "fsdp" if sharded else "none"}
    )
    one = SimpleNamespace(is_main_process=True, print=print, wait_for_everyone=lambda: None)
    return State(
        run=run,
        settings=run_settings,
        accelerator=one,
        policy=SimpleNamespace(trained=trained, sharded=sharded),
        scaler=None,
        ema=None,
        iteration=0,
        seconds=0.0,
        cpu_seconds=0.0,
        optimizer=torch.optim.AdamW(trained, lr=0.1),
        chunks=None,
        profile=None,
        averaged_weights=dict,
    )


def train(state: SimpleNamespace, upto: int, before_last=lambda state: None) -> dict[int, list]:
    """Iterations, each with a line and a checkpoint; the weights after each."""
    seen = {}
    while state.iteration < upto:
        for p in state.policy.trained:
            p.grad = torch.ones_like(p)
        state.optimizer.step()
        state.iteration += 1
        append_json_line(state.run / "metrics.jsonl", {"iteration": state.iteration})
        seen[state.iteration] = values(state)
        if state.iteration == upto:
            before_last(state)
        resuming.save_checkpoint(state)
    return seen


def values(state) -> list:
    return [trainable.full_tensor(p.detach()).clone().tolist() for p in state.policy.trained]


def begin(run: Path, kind: str) -> SimpleNamespace:
    """A run folder with its state, before its first iteration."""
    run.mkdir()
    state = fresh(run, kind)
    note = {
        "settings": state.settings.model_dump(mode="json"),
        "status": "created",
        "run_id": "this",
    }
    write_json(run / "run.json", note)
    write_json(run / "profile.json", {"chunks": "2,3,4,7", "mean": [1.0] * 16})
    append_json_line(run / "metrics.jsonl", {"iteration": 0})
    return state


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three iterations of each kind, with the weights after each."""
    out = {}
    for kind in ("whole", "parts"):
        run = tmp_path_factory.mktemp(kind) / "run"
        out[kind] = run, train(begin(run, kind), 3)
    return out


def newest(run: Path, name: str = "") -> Path:
    """A file of the newest checkpoint; of those that have a number in their name the first."""
    return sorted((run / "checkpoints" / "000003").glob(name or "*"))[0]


def flip(file: Path) -> None:
    """Another bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


HARM = {
    "flipped": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "missing": Path.unlink,
    "object": lambda file: file.write_text("{}"),
    "list": lambda file: file.write_text("[]"),
}
FILES = {"whole": ["weights.safetensors", "optimizer.safetensors"], "parts": ["*.safetensors"]}


@pytest.mark.parametrize(
    "kind, name, harm",
    [
        (kind, name, harm)
        for kind in ("whole", "parts")
        for harm in HARM
        for name in [*FILES[kind], "state.json", "manifest.json", "metrics.jsonl", "profile.json"]
    ],
)
def test_a_damaged_file_of_the_newest_checkpoint(trained, tmp_path, capsys, kind, name, harm):
    run = tmp_path / "run"
    seen = trained[kind][1]
    shutil.copytree(trained[kind][0], run)
    HARM[harm](newest(run, name))
    falls_back(run, kind, seen, capsys)


def falls_back(run, kind, seen, capsys) -> None:
    """The run goes on from the second iteration, and says so; the other checkpoint is set aside."""
    state = fresh(run, kind)
    resuming.resume(state)
    said = capsys.readouterr().out
    assert state.iteration == 2 and values(state) == seen[2]
    assert said.startswith("warning: resume: the checkpoint") and said.count("\n") == 1
    assert said.endswith("; the run resumes from 000002\n")
    assert [
        json.loads(line)["iteration"] for line in (run / "metrics.jsonl").read_text().splitlines()
    ] == [0, 1, 2]
    assert (run / "checkpoints" / "damaged-000003").is_dir() and not (
        run / "checkpoints" / "000003"
    ).exists()
    assert train(state, 3)[3] == seen[3], "the third iteration is done again"


def other_seed(state):
    state.settings = state.settings.model_copy(update={"seed": 7})


def other_run(state):
    note = json.loads((state.run / "run.json").read_text())
    write_json(state.run / "run.json", note | {"run_id": "that"})


def set_weight(value):
    def change(state):
        with torch.no_grad():
            (p.to_local() if hasattr(p := state.policy.trained[0], "to_local") else p).fill_(value)

    return change


def set_moment(state):
    moment = next(iter(state.optimizer.state.values()))["exp_avg"]
    (moment.to_local() if hasattr(moment, "to_local") else moment).fill_(float("inf"))


def broadcast(state):
    state.policy.trained = [torch.zeros(1), *state.policy.trained[1:]]


def fewer(state):
    state.policy.trained = state.policy.trained[1:]


def lines(*numbers):
    def change(state):
        text = "".join(f'{{"iteration": {n}}}\n' for n in numbers)
        (state.run / "metrics.jsonl").write_text(text)

    return change


WRITTEN_WRONG = {
    "nan": set_weight(float("nan")),
    "infinite": set_weight(float("inf")),
    "moment": set_moment,
    "seed": other_seed,
    "run": other_run,
    "shape": broadcast,
    "fewer": fewer,
    "lost line": lines(0, 1, 3),
    "doubled line": lines(0, 1, 2, 2, 3),
    "short": lines(0, 1, 2),
}


@pytest.mark.parametrize("kind", ["whole", "parts"])
@pytest.mark.parametrize("case", WRITTEN_WRONG)
def test_a_checkpoint_whose_sums_are_right_and_whose_content_is_not(tmp_path, capsys, kind, case):
    run = tmp_path / "run"
    state = begin(run, kind)
    note = (run / "run.json").read_text()
    seen = train(state, 2)
    log = (run / "metrics.jsonl").read_text()
    seen |= train(state, 3, WRITTEN_WRONG[case])
    (run / "run.json").write_text(note)
    (run / "metrics.jsonl").write_text(log + '{"iteration": 3}\n')
    falls_back(run, kind, seen, capsys)


@pytest.mark.parametrize(
    "case", ["mixed", "of another iteration", "a further file", "changed iteration", "re-signed"]
)
def test_checkpoints_that_were_mixed_or_edited(trained, tmp_path, capsys, case):
    run = tmp_path / "run"
    seen = trained["whole"][1]
    shutil.copytree(trained["whole"][0], run)
    old, new = (run / "checkpoints" / name for name in ("000002", "000003"))
    if case == "mixed":
        shutil.copy(old / "optimizer.safetensors", new)
    elif case == "of another iteration":
        shutil.rmtree(new)
        shutil.copytree(old, new)
    elif case == "a further file":
        (new / "more.safetensors").touch()
    else:
        state = json.loads((new / "state.json").read_text())
        (new / "state.json").write_text(json.dumps(state | {"iteration": 30}))
        if case == "re-signed":
            manifest = json.loads((new / "manifest.json").read_text())
            (new / "manifest.json").unlink()
            checkpoints.write_manifest(
                new, {k: manifest[k] for k in ("iteration", "run_id", "settings")}, {}
            )
    falls_back(run, "whole", seen, capsys)


EDITS = {
    "line lost": lambda text: text.replace('{"iteration": 1}\n', ""),
    "line doubled": lambda text: text + text[-17:],
    "line changed": lambda text: text.replace("1", "5"),
    "emptied": lambda text: "",
    "no JSON": lambda text: "?\n" + text,
    "object": lambda text: "{}",
    "empty line": lambda text: text + "\n",
    "zeros": lambda text: text + "\0" * 9 + "\n",
    "no UTF-8": lambda text: text.encode() + b"\xff\xfe\n",
}


@pytest.mark.parametrize("name", ["metrics.jsonl", "profile.json"])
@pytest.mark.parametrize("edit", EDITS)
def test_edited_files_of_the_run_are_those_of_the_checkpoint_again(
    trained, tmp_path, capsys, name, edit
):
    run = tmp_path / "run"
    shutil.copytree(trained["whole"][0], run)
    before = (run / name).read_text()
    edited = EDITS[edit](before)
    edited = edited if isinstance(edited, bytes) else edited.encode()
    (run / name).write_bytes(edited)
    state = fresh(run, "whole")
    resuming.resume(state)
    assert state.iteration == 3 and (run / name).read_text() == before
    changed_back = "warning" in capsys.readouterr().out
    assert changed_back == (not edited.startswith(before.encode()))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"run_id": "that"}, "was written by another run"),
        ({"settings": {"seed": 5}}, "`seed` must stay 0"),
        ({"settings": {"learning_rate": 5.0}}, "`learning_rate` must stay"),
        ({"run_id": 5}, "`run_id` must be"),
    ],
)
def test_an_edited_run_json_is_refused(trained, tmp_path, change, words):
    run = tmp_path / "run"
    shutil.copytree(trained["whole"][0], run)
    note = json.loads((run / "run.json").read_text())
    state = fresh(run, "whole")
    whole = note["settings"] | change.get("settings", {})
    write_json(run / "run.json", note | change | {"settings": whole})
    state.settings = settings.load_settings(whole)
    with pytest.raises(InputError) as error:
        resuming.resume(state)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert len(checkpoints.list_checkpoints(run)) == 3, "nothing is set aside"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained["whole"][0], run)
    for folder in checkpoints.list_checkpoints(run):
        flip(folder / "weights.safetensors")
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(
        InputError, match="000003 is damaged .*; no checkpoint of this run can be used"
    ):
        resuming.resume(fresh(run, "whole"))
    assert (run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("crash", [b"", b"\n", b"\0" * 9 + b"\n", b"\xff\xfe\n", b'{"iteration": '])
def test_lost_checkpoints_are_said(trained, tmp_path, capsys, crash):
    """Also where the crash that lost them left a line that is none."""
    run = tmp_path / "run"
    shutil.copytree(trained["whole"][0], run)
    shutil.rmtree(run / "checkpoints")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(crash)
    resuming.resume(fresh(run, "whole"))
    assert "has no checkpoint; its 3 iterations are repeated" in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_bytes() == b""


def test_what_a_killed_process_had_begun_is_removed(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained["whole"][0], run)
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = [run / "checkpoints" / f".000004.{gone.pid}.part", run / f".evaluation.{gone.pid}.part"]
    for folder in left:
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(bytes(1000))
    (run / ".notes.2024").write_text("mine")
    resuming.resume(fresh(run, "whole"))
    assert not any(folder.exists() for folder in left) and (run / ".notes.2024").is_file()


def test_no_bit_of_a_checkpoint_can_flip_unseen(trained, tmp_path):
    """Of any of its files; every file is looked at in forty places."""
    run = tmp_path / "run"
    shutil.copytree(trained["whole"][0], run)
    folder = run / "checkpoints" / "000003"
    about = fresh(run, "whole").identity
    checkpoints.verify_checkpoint(folder, about)
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), max(1, 8 * len(whole) // 40)):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            file.write_bytes(content)
            with pytest.raises(InputError, match="is damaged|was written by another run"):
                checkpoints.verify_checkpoint(folder, about)
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "one, other",
    [
        ("weights.safetensors", "optimizer.safetensors"),
        ("optimizer.safetensors", "profile.json"),
        ("profile.json", "metrics.jsonl"),
    ],
)
def test_files_of_a_checkpoint_that_were_exchanged(trained, tmp_path, capsys, one, other):
    run = tmp_path / "run"
    seen = trained["whole"][1]
    shutil.copytree(trained["whole"][0], run)
    files = [newest(run, name) for name in (one, other)]
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)
    falls_back(run, "whole", seen, capsys)


FINAL = {
    "flipped": flip,
    "cut": HARM["cut"],
    "empty": HARM["empty"],
    "text": lambda file: file.write_text("x" * 999),
    "nan": lambda file: save_file({k: v * float("nan") for k, v in load_file(file).items()}, file),
    "other values": lambda file: save_file({k: v + 1 for k, v in load_file(file).items()}, file),
    "fewer": lambda file: save_file(dict(list(load_file(file).items())[1:]), file),
    "other shapes": lambda file: save_file({k: v[None] for k, v in load_file(file).items()}, file),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """As much of a finished run as its images need: the pocket model's own weights, and their hash."""
    run = tmp_path_factory.mktemp("finished") / "run"
    model = trainable.load_trainable_policy("pocket", resolution=64, max_tokens=12)
    trainable.save_trained_weights(model, run / "final")
    note = {"status": "finished", "final_sha256": hash_files(run / "final")}
    write_json(
        run / "run.json",
        note | {"settings": settings.load_settings("pocket/tiny").model_dump(mode="json")},
    )
    return run


def test_a_final_folder_without_weights_has_no_hash(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    for file in (run / "final").glob("*.safetensors"):
        file.unlink()
    run_info = read_json(run / "run.json")
    run_info.pop("final_sha256", None)
    write_json(run / "run.json", run_info)
    with pytest.raises(InputError, match="holds no trained weights"):
        run_images.hash_trained_weights(run)


@pytest.mark.parametrize("harm", FINAL)
def test_damaged_weights_are_not_drawn_with(finished, tmp_path, harm):
    """The hash of the run knows all of them, and without it those that no model can have are refused."""
    run = tmp_path / "run"
    run_settings = settings.load_settings("pocket/tiny")
    shutil.copytree(finished, run)
    run_images.hash_trained_weights(run)
    FINAL[harm](next((run / "final").glob("*.safetensors")))
    with pytest.raises(InputError, match="are not those that the training wrote"):
        parts.unfinished_evaluation_folder(
            run, run_settings, {"base": 0, "plain": None}, ["a star"]
        )
    if harm not in ("flipped", "other values"):
        with pytest.raises(
            InputError, match="the weights in .*final are (damaged|those of another model)"
        ):
            run_images.load_trained_policy(run, run_settings)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """A run with an evaluation of a few images."""
    return synthetic.write(tmp_path_factory.mktemp("evaluated") / "run", prompts=3, objects=True)


def renamed(old, new):
    return lambda text: text.replace(f'"{old}"', f'"{new}"', 1)


WRONG_SUMMARY = {
    "no rewards": (renamed("rewards", "prizes"), "`rewards` is missing"),
    "list": (lambda text: "[]", "must be a JSON object"),
    "cut": (lambda text: text[:-20], "cannot be read"),
    "no mean": (renamed("mean", "middle"), ".mean` is missing"),
    "text": (
        lambda text: re.sub(r'"mean": [-0-9.e]+', '"mean": "much"', text, count=1),
        "number; got the text 'much'",
    ),
    "no number": (
        lambda text: re.sub(r'"mean": [-0-9.e]+', '"mean": NaN', text, count=1),
        "finite number; got NaN",
    ),
    "negative": (
        lambda text: re.sub(r'"n_prompts": 3', '"n_prompts": -3', text),
        "`n_prompts` must be",
    ),
}
WRONG_SCORES = {
    "no arm": (renamed("arm", "leg"), "`arm` is missing"),
    "text": (lambda text: "x\n" + text, "line 1"),
    "list": (lambda text: "[1]\n" + text, "must be a JSON object"),
    "no prompt": (renamed("prompt", "p"), "`prompt` is missing"),
    "word": (
        lambda text: re.sub(r'("scores": {"[^"]+": )[-0-9.e]+', r'\1"much"', text, count=1),
        "the text 'much'",
    ),
    "index": (
        lambda text: text.replace('"prompt_index": 0', '"prompt_index": "0"', 1),
        "`prompt_index` must be",
    ),
}


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("summary.json", case) for case in WRONG_SUMMARY),
        *(("scores.jsonl", case) for case in WRONG_SCORES),
    ],
)
def test_a_damaged_evaluation_is_one_sentence(evaluated, name, case):
    """Of the summary and of the scores; the file is named, and the whole one is read."""
    file = evaluated / "evaluation" / name
    harm, words = (WRONG_SUMMARY if name == "summary.json" else WRONG_SCORES)[case]
    read = (
        run_folder.read_evaluation_summary
        if name == "summary.json"
        else run_folder.read_evaluation_records
    )
    whole = read(evaluated)
    text = file.read_text()
    assert len(whole) >= 5 and harm(text) != text
    file.write_text(harm(text))
    with pytest.raises(InputError) as error:
        read(evaluated)
    file.write_text(text)
    assert (
        words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({}, "`part` is missing"),
        ({"part": ["base", 0], "records": []}, "`part`"),
        (
            {"part": ["base", 0, 1], "records": [{"arm": "base"}]},
            "`records.0.prompt_index` is missing",
        ),
    ],
)
def test_a_damaged_part_of_an_evaluation_is_one_sentence(tmp_path, line, words):
    (tmp_path / "parts-1.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError) as error:
        parts.read_parts(tmp_path)
    assert words in str(error.value) and "line 1 of" in str(error.value)


def test_reference_weights_replace_no_other_group_of_a_checkpoint(tmp_path):
    """A method may call its reference weights ema, as awm does, or weights."""
    run = tmp_path / "run"
    state = begin(run, "whole")
    own = {name: [p.detach() + i for p in state.policy.trained] for i, name in enumerate("abc", 1)}
    state.ema = SimpleNamespace(shadow_params=own["a"], optimization_step=5)
    state.reference_weights = {"ema": own["b"], "weights": own["c"]}
    state.averaged_weights = lambda: TrainingState.averaged_weights(state)
    before = values(train_one(state))
    stored = checkpoints.read_tensors(resuming.last_checkpoint_folder(state))
    assert set(stored) == {"weights", "optimizer", "ema", "reference_ema", "reference_weights"}
    assert torch.equal(stored["ema"]["0"], own["a"][0])
    assert torch.equal(stored["reference_ema"]["0"], own["b"][0])
    assert stored["weights"]["0"].tolist() == before[0]


def train_one(state):
    """The state after one more iteration, which is saved."""
    train(state, state.iteration + 1)
    return state


def test_a_checkpoint_of_before_names_its_reference_weights_without_the_prefix(tmp_path):
    run = tmp_path / "run"
    state = begin(run, "whole")
    old = [p.detach() + 1 for p in state.policy.trained]
    state.averaged_weights = lambda: {"old": old}
    train_one(state)
    resumed = fresh(run, "whole")
    copy = [torch.zeros_like(p) for p in old]
    resumed.averaged_weights = lambda: {"reference_old": copy}
    resuming.resume(resumed)
    assert resumed.iteration == 1 and all(map(torch.equal, copy, old))


@pytest.mark.parametrize("name", ["ema", "weights"])
def test_a_checkpoint_of_before_that_lost_a_group_is_not_used(tmp_path, name):
    """The moving average and the reference had one file, or the reference that of the weights."""
    run = tmp_path / "run"
    state = begin(run, "whole")
    average = [p.detach() + 1 for p in state.policy.trained]
    state.averaged_weights = lambda: {"ema": average}
    train_one(state)
    resumed = fresh(run, "whole")
    resumed.averaged_weights = lambda: {"ema": average, f"reference_{name}": average}
    with pytest.raises(InputError, match=f"it has no reference_{name}"):
        resuming.resume(resumed)


def test_a_profile_that_is_measured_again_was_not_changed(trained, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained["whole"][0], run)
    before = (run / "profile.json").read_text()
    write_json(run / "profile.json", {"chunks": "2,3,4,7", "mean": [2.0] * 16})
    state = fresh(run, "whole")
    state.settings = state.settings.model_copy(update={"profile_every": 2})
    monkeypatch.setattr(checkpoints, "verify_checkpoint", lambda *_: None)  # of other settings
    resuming.resume(state)
    assert capsys.readouterr().out == "" and (run / "profile.json").read_text() == before
    (run / "profile.json").unlink()
    resuming.resume(fresh(run, "whole"))
    assert "profile.json was changed or lost" in capsys.readouterr().out
