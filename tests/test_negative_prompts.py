"""Negative prompts of a run and of single records, and another guidance in evaluation than in training."""

import json

import pytest
import tiny_families
from commands import call, run
from small_runs import metrics, trained, write

from chunk_grpo import InputError
from chunk_grpo.core.settings import Settings, guidance_scales
from chunk_grpo.models import inputs
from chunk_grpo.models.cost import find_model_config
from chunk_grpo.planning.counts import evaluation_flops, evaluation_forwards, iteration_flops
from chunk_grpo.planning.disk import count_encoded_prompts, run_disk_bytes

FEW = ["prompts_per_iteration=2", "images_per_prompt=2", "eval_every=1", "eval_count=2"]
FEW = [*FEW, "steps=5", "chunks=2,2", "--no-report"]
RECORDS = [
    {"prompt": "a red star", "negative_prompt": "a blue circle"},
    {"prompt": "two cats", "negative_prompt": " "},
    {"prompt": "three dogs"},
]


def write_records(path, records):
    """Write JSON lines; the path as text."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def lists(folder, **more):
    """Settings whose lists both hold RECORDS."""
    source = write_records(folder / "list.jsonl", RECORDS)
    return {"prompts": source, "eval_prompts": source} | more


def test_records_have_negative_prompts_of_their_own(tmp_path):
    """A blank one is none; the column's name may be written in any way; other files than JSON lines have them too."""
    source = lists(tmp_path)["prompts"]
    assert inputs.read_prompts(source) == ["a red star", "two cats", "three dogs"]
    assert inputs.read_negative_prompts(source) == {"a red star": "a blue circle"}
    assert inputs.describe_prompts(source).endswith("none repeated, 1 with a negative prompt")
    (tmp_path / "a.csv").write_text("Prompt,Negative Prompt\na cat,blurry\na dog,\n")
    assert inputs.read_negative_prompts(str(tmp_path / "a.csv")) == {"a cat": "blurry"}
    assert inputs.read_negative_prompts(f"{tmp_path / 'a.csv'}:prompt") == {}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"prompt": "two cats", "negative_prompt": "dogs"},
            "a second negative prompt for 'two cats'",
        ),
        ({"prompt": "a hat", "negative_prompt": 5}, "line 4 of .* holds 5 as negative_prompt"),
        ({"prompt": "a hat", "negative_prompt": "x" * 30_000}, "of 30000 characters"),
    ],
)
def test_a_negative_prompt_that_cannot_be_is_rejected(record, words, tmp_path):
    source = write_records(tmp_path / "list.jsonl", [*RECORDS, record])
    with pytest.raises(InputError, match=words):
        inputs.read_negative_prompts(source)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"prompt": "a hat", "negative_prompt": "red", "Negative Prompt": "blue"}',
            "line 1 of .* must have at most one negative prompt; got 2",
        ),
        (
            '{"prompt": "a hat", "negative_prompt": "red", "negative_prompt": "blue"}',
            "line 1: the field 'negative_prompt' must occur once; it occurs 2 times",
        ),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "json", "txt"])
def test_record_with_two_negative_prompts_is_rejected(line, words, ending, tmp_path):
    source = tmp_path / f"list.{ending}"
    source.write_text(f"[{line}]" if ending == "json" else line)
    if ending == "json":
        words = words.replace("line 1 of", "entry 1 of").replace("line 1: ", "")
    with pytest.raises(InputError, match=words):
        inputs.read_prompts(str(source))


def test_blank_negative_prompt_leaves_that_of_another_field(tmp_path):
    record = {"prompt": "a hat", "negative_prompt": "red", "Negative Prompt": " "}
    source = write_records(tmp_path / "list.jsonl", [record])
    assert inputs.read_negative_prompts(source) == {"a hat": "red"}


def test_record_with_two_sizes_is_rejected(tmp_path):
    record = {"prompt": "a hat", "height": 64, "Height": 96, "width": 64}
    source = write_records(tmp_path / "list.jsonl", [record])
    with pytest.raises(InputError, match="must name the height of its images once; got 64 and 96"):
        inputs.read_prompt_records(source, sizes=True)


def test_negative_prompts_without_guidance_are_rejected_before_a_folder_is_made(tmp_path):
    """Those of records and that of the run, in one sentence."""
    with pytest.raises(InputError, match="`negative_prompt` must be empty without classifier-free"):
        Settings(negative_prompt="blurry")
    assert Settings(negative_prompt="blurry", eval_true_cfg_scale=2.0).negative_prompt == "blurry"
    words = [f"{name}={source}" for name, source in lists(tmp_path).items()]
    for command in (
        ["train", "pocket/tiny", *words, "--out", tmp_path / "run"],
        ["plan", "pocket/tiny", *words],
    ):
        done = call(*command)
        assert done.returncode == 2 and not (tmp_path / "run").exists()
        (line,) = done.stderr.splitlines()
        assert "which only classifier-free guidance uses; set `true_cfg_scale` above 1" in line


def test_negative_prompts_that_only_evaluation_could_use_are_rejected_in_another_list(tmp_path):
    """Those of a list that both phases read are used in evaluation, which also samples as in training."""
    (tmp_path / "plain.txt").write_text("a hat\n")
    plain = str(tmp_path / "plain.txt")
    guided = {"eval_true_cfg_scale": 2.0}
    settings = Settings(**lists(tmp_path, eval_prompts=plain, **guided))
    with pytest.raises(InputError, match="^prompts: .*; set `true_cfg_scale` above 1"):
        inputs.read_run_negative_prompts(settings)
    assert inputs.read_run_negative_prompts(Settings(**lists(tmp_path, **guided)))
    other = lists(tmp_path, prompts=plain, true_cfg_scale=2.0, eval_true_cfg_scale=1.0)
    assert inputs.read_run_negative_prompts(Settings(**other), ["eval_prompts"])


def test_a_prompt_of_both_lists_may_have_a_negative_prompt_that_only_evaluation_uses(
    tmp_path, monkeypatch
):
    """Whether the training list repeats it or not; another one there is used nowhere."""
    held_out = write_records(tmp_path / "held.jsonl", RECORDS)
    star = "a red star"
    for record, is_allowed in (
        ({"prompt": star, "negative_prompt": "a blue circle"}, True),
        ({"prompt": star}, True),
        ({"prompt": star, "negative_prompt": "green"}, False),
    ):
        training = write_records(tmp_path / "training.jsonl", [record, {"prompt": "a hat"}])
        settings = Settings(prompts=training, eval_prompts=held_out, eval_true_cfg_scale=2.0)
        if is_allowed:
            assert inputs.read_run_negative_prompts(settings) == {star: "a blue circle"}
        else:
            with pytest.raises(InputError, match="^prompts: records of .*training.jsonl have"):
                inputs.read_run_negative_prompts(settings)
    # One list, named in two ways, is used in evaluation.
    monkeypatch.chdir(tmp_path)
    settings = Settings(prompts="./held.jsonl", eval_prompts=held_out, eval_true_cfg_scale=2.0)
    assert inputs.read_run_negative_prompts(settings, ["prompts"]) == {star: "a blue circle"}


def test_lists_that_contradict_each_other_are_rejected(tmp_path):
    other = write_records(tmp_path / "other.jsonl", [RECORDS[2], {"prompt": "a red star"}])
    settings = Settings(**lists(tmp_path, eval_prompts=other, true_cfg_scale=2.0))
    with pytest.raises(
        InputError, match="eval_prompts: .* another negative prompt for 'a red star'"
    ):
        inputs.read_run_negative_prompts(settings)
    assert inputs.read_run_negative_prompts(settings, ["prompts"]) == {
        "a red star": "a blue circle"
    }


def test_plan_counts_negative_prompts_and_the_guidance_of_evaluation(tmp_path):
    config = find_model_config("black-forest-labs/FLUX.1-dev")
    plain = Settings(**lists(tmp_path)).model_copy()
    words = lists(tmp_path, negative_prompt="blurry", eval_true_cfg_scale=3.0)
    guided = Settings(**words)
    with pytest.raises(InputError, match="only classifier-free guidance"):
        run_disk_bytes(plain, config)
    (tmp_path / "plain.txt").write_text("a red star\ntwo cats\nthree dogs\n")
    source = str(tmp_path / "plain.txt")
    plain = Settings(prompts=source, eval_prompts=source)
    assert count_encoded_prompts(guided, config) == count_encoded_prompts(plain, config) + 2
    both = iteration_flops(plain, config), iteration_flops(guided, config)
    assert both[0] == both[1]
    once = evaluation_flops(plain, config), evaluation_flops(guided, config)
    assert once[1][0] == 2 * once[0][0] and once[0][2] < once[1][2] < 2 * once[0][2]
    assert evaluation_forwards(guided)["as trained"] == evaluation_forwards(plain)["as trained"]


@pytest.mark.parametrize("name", ["dev", pytest.param("sd3", marks=pytest.mark.slow)])
def test_a_run_is_led_away_from_its_negative_prompts(name, tmp_path):
    """They change the training, a resumed run is the same, and another list is another input."""
    model = str(tiny_families.build(name, tmp_path / name))
    folder = write(tmp_path, model=model, true_cfg_scale=3.0, **lists(tmp_path))
    train = ["train", folder / "s.yaml", *FEW]
    run(*train, "iterations=2", "negative_prompt=a photo", "--out", folder / "whole")
    run(*train, "iterations=1", "negative_prompt=a photo", "--out", folder / "parts")
    run(*train, "iterations=2", "negative_prompt=a photo", "--out", folder / "parts", "--resume")
    run(*train, "iterations=2", "--out", folder / "empty")
    assert trained(folder / "whole") == trained(folder / "parts") != trained(folder / "empty")
    lines = metrics(folder / "whole")
    assert lines[1]["ratio_floor"] < 1e-5 and lines != metrics(folder / "empty")

    run("evaluate", folder / "whole")
    scores = (folder / "whole" / "evaluation" / "scores.jsonl").read_text()
    write_records(tmp_path / "list.jsonl", [RECORDS[0] | {"negative_prompt": "the"}, *RECORDS[1:]])
    done = call("evaluate", folder / "whole")
    assert done.returncode == 2 and "prompts" in done.stderr
    assert (folder / "whole" / "evaluation" / "scores.jsonl").read_text() == scores


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dev", pytest.param("sd3", marks=pytest.mark.slow)])
def test_evaluation_has_its_own_guidance(name, tmp_path):
    """Training is the same to the bit as without; the base's evaluation is that of a run with this guidance."""
    model = str(tiny_families.build(name, tmp_path / name))
    folder = write(tmp_path, model=model)
    train = ["train", folder / "s.yaml", *FEW, "iterations=1"]
    scale = 2 if name == "dev" else 0  # SD3 takes no embedded guidance scale
    own = ["eval_true_cfg_scale=3", f"eval_guidance={scale}", "negative_prompt=two dogs"]
    run(*train, "--out", folder / "usual")
    run(*train, *own, "--out", folder / "own")
    run(*train, "true_cfg_scale=3", f"guidance={scale}", own[2], "--out", folder / "guided")
    assert trained(folder / "usual") == trained(folder / "own") != trained(folder / "guided")
    usual, own, guided = (metrics(folder / run) for run in ("usual", "own", "guided"))
    names = [key for key in usual[0] if key.startswith("eval_")]
    assert names and all(own[0][key] == guided[0][key] != usual[0][key] for key in names)

    run("evaluate", folder / "own")
    summary = json.loads((folder / "own" / "evaluation" / "summary.json").read_text())
    assert summary["guidance"] == [scale, 3] and summary["as_trained"]["guidance"] == [3.5, 1]
    run("evaluate", folder / "usual", "eval_true_cfg_scale=3", f"eval_guidance={scale}")
    done = call("evaluate", folder / "usual", "true_cfg_scale=3")
    assert done.returncode == 2 and "eval_true_cfg_scale" in done.stderr
    if name == "sd3":
        done = call("evaluate", folder / "usual", "eval_guidance=2")
        assert done.returncode == 2 and "takes no guidance scale; got 2" in done.stderr


def test_guidance_of_evaluation_is_that_of_training_unless_it_is_set():
    assert guidance_scales(Settings(true_cfg_scale=2.0)) == ((3.5, 2.0), (3.5, 2.0))
    settings = Settings(true_cfg_scale=2.0, eval_true_cfg_scale=1.0, eval_guidance=0.0)
    assert guidance_scales(settings) == ((3.5, 2.0), (0.0, 1.0))
    for value in (0.5, "2", True, float("nan")):
        with pytest.raises(
            InputError, match="`eval_true_cfg_scale` must be a number of at least 1"
        ):
            Settings(eval_true_cfg_scale=value)


def test_a_distilled_model_is_not_guided_in_evaluation(tmp_path):
    tiny_families.klein(tmp_path / "klein", distilled=True)
    folder = write(tmp_path, model=str(tmp_path / "klein"))
    done = call("train", folder / "s.yaml", "eval_true_cfg_scale=3", "--out", folder / "run")
    assert done.returncode == 2 and not (folder / "run").exists()
    assert "the model is distilled; allowed is 1" in done.stderr


def test_a_benchmark_and_a_list_of_samples_do_not_read_negative_prompts(tmp_path):
    """They are said to be unused rather than dropped."""
    with pytest.raises(InputError, match="sets negative_prompt to 'a blue circle'"):
        inputs.read_prompts(lists(tmp_path)["prompts"], negative_prompts=False)
