"""Benchmarks of a run as a user draws and scores them: killed, shared over processes, refused, and of other origin."""

import json
import shutil
import time

import pandas as pd
import pytest
from commands import run, start
from PIL import Image
from stub_judge import serve
from typer.testing import CliRunner

from chunk_grpo import InputError
from chunk_grpo.cli.evaluation import evaluation_app
from chunk_grpo.core.files import read_json, read_json_lines
from chunk_grpo.evaluation import benchmarks, evaluate, judged, paper_tables, parts
from chunk_grpo.evaluation.judge import Judge
from chunk_grpo.reward_serving import placement


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished small run and a list of six prompts."""
    folder = tmp_path_factory.mktemp("benchmark")
    prompts = (
        "a red circle",
        "a blue square",
        "two stars",
        "a green star",
        "three circles",
        "a red square",
    )
    (folder / "six.txt").write_text("\n".join(prompts))
    run(
        "train",
        "pocket/tiny",
        "iterations=1",
        "eval_every=0",
        "threads=1",
        "rollout_batch=1",
        "--out",
        folder / "run",
        "--no-report",
    )
    return folder


def images(folder):
    """Every image of a benchmark, byte for byte."""
    return {
        str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.png"))
    }


def test_a_killed_drawing_goes_on_and_processes_share_it(trained):
    folder = trained / "run" / "benchmarks" / "six"
    words = (
        "evaluate",
        trained / "run",
        "--benchmark",
        trained / "six.txt",
        "--samples",
        "2",
        "--rewards",
        "pocket-clip",
    )
    said = run(*words)
    whole = images(folder)
    assert len(whole) == 3 * 6 * 2 and "report:" in said and "pocket-clip" in said
    summary = read_json(folder / "summary.json")
    table = (folder / "scores.jsonl").read_bytes()
    assert summary["rewards"]["pocket-clip"]["plain-base"]["n"] == 6
    again = trained / "again"
    folder.rename(again)
    for _ in range(3):  # on a slow machine the drawing may end before it is killed
        shutil.rmtree(folder, ignore_errors=True)
        child = start(*words)
        end = time.time() + 300
        while not any((folder / "plain").glob("*.png")):
            assert child.poll() is None and time.time() < end
            time.sleep(0.01)
        child.kill()
        child.wait()
        there = images(folder)
        if len(there) < 36:
            break
    assert 12 < len(there) < 36 and there.items() <= whole.items()
    run(*words, "--processes", "2", "--no-report")
    assert images(folder) == whole
    assert [r["scores"] for r in read_json_lines(folder / "scores.jsonl")] == [
        json.loads(line)["scores"] for line in table.splitlines()
    ]
    assert read_json(folder / "summary.json")["rewards"] == summary["rewards"]
    said = run(*words, "eval_seed=3", code=2)
    assert "seed 1000, not 3" in said and images(folder) == whole


def test_a_second_process_on_the_same_benchmark_is_refused(trained):
    """Another benchmark of the run may be sampled meanwhile."""
    run_folder = trained / "run"
    six = trained / "six.txt"
    (trained / "two.txt").write_text("a red circle\na blue square\n")
    with parts.evaluation_lock(run_folder, "six"):
        with pytest.raises(InputError, match="is being evaluated on six by another process"):
            benchmarks.run_benchmark(run_folder, str(six), trust=True)
        out = benchmarks.run_benchmark(run_folder, str(trained / "two.txt"), samples=1, trust=True)
    assert len(images(out)) == 3 * 2
    assert not (run_folder / "evaluation.begun").exists()


def test_the_papers_tables_take_the_run_in(trained):
    """The page has the paper's numbers, the run's beside them, images by method, and the rows that nobody measured.

    The run has a second benchmark, which does not contain the prompt that is shown.
    """
    out = trained / "tables.html"
    (trained / "other.txt").write_text("a red circle\na blue square\n")
    benchmarks.run_benchmark(trained / "run", str(trained / "other.txt"), samples=1, trust=True)
    evaluated = "evaluate", trained / "run", "--benchmark", trained / "six.txt", "--samples", "2"
    run(*evaluated, "--rewards", "pocket-clip", "--no-report")
    words = (
        "tables",
        trained / "run",
        "--name",
        "HPSv3=pocket-clip",
        "--name",
        "hpsv3=pocket-clip",
        "--prompts",
        "six",
        "--out",
        out,
    )
    said = run(*words, "--show", "seven stars", code=2)
    assert "'seven stars' is a prompt of none of the runs' benchmarks" in said
    assert not out.exists()
    run(*words, "--show", "two stars")
    text = out.read_text()
    rewards = read_json(trained / "run" / "benchmarks" / "six" / "summary.json")["rewards"][
        "pocket-clip"
    ]
    for arm in ("base", "hybrid"):
        assert f'here, 1 run</td><td class="number">{rewards[arm]["mean"]:.3f}' in text, arm
    assert "15.236" in text and "Not measured here: Dance-GRPO; Chunk-GRPO +ws" in text
    assert text.count("<img") == 1 and "six: 1 prompt, one image" in text


def test_images_of_another_origin(trained):
    folders = {arm: trained / "again" / arm for arm in ("base", "plain")}
    pairs = [word for arm, folder in folders.items() for word in ("--images", f"{arm}={folder}")]
    words = (
        "evaluate",
        "--benchmark",
        trained / "six.txt",
        "--samples",
        "2",
        "--rewards",
        "pocket-clip",
    )
    out = trained / "elsewhere"
    assert "scores:" in run(*words, *pairs, "--out", out, "--no-report")
    mine, theirs = (
        read_json(f / "summary.json")["rewards"]["pocket-clip"] for f in (out, trained / "again")
    )
    assert mine["plain-base"] == theirs["plain-base"]
    victim = folders["plain"] / "00004_1.png"
    kept = victim.read_bytes()
    victim.unlink()
    said = run(*words, *pairs, "--out", trained / "third", code=2)
    victim.write_bytes(kept)
    assert (
        "lacks 1 of 12 images of plain, first 00004_1.png" in said
        and not (trained / "third").exists()
    )


def test_geneval_has_its_layout_and_needs_a_detector(trained, tmp_path):
    record = {
        "tag": "counting",
        "include": [{"class": "bench", "count": 2}],
        "exclude": [{"class": "bench", "count": 3}],
        "prompt": "a photo of two benches",
    }
    (tmp_path / "few.jsonl").write_text(json.dumps(record) + "\n")
    said = run(
        "evaluate",
        trained / "run",
        "--benchmark",
        "geneval",
        "--source",
        tmp_path / "few.jsonl",
        code=2,
    )
    folder = trained / "run" / "benchmarks" / "geneval"
    assert "detector" in said and "convert_detector" in said
    nowhere = ("--source", tmp_path / "few.jsonl", "--detector", tmp_path / "nowhere")
    said = run("evaluate", trained / "run", "--benchmark", "geneval", *nowhere, code=2)
    assert "`detector` must be a folder of weights" in said
    assert not folder.exists(), "images were drawn before the detector was loaded"


def test_arms_are_the_evaluations(trained):
    """A benchmark of the held-out prompts shows what the evaluation of the run shows."""
    where = trained / "run"
    settings, arms = benchmarks.prepare_benchmark(
        where, benchmarks.load_benchmark_task("pocket:test"), trained / "held", ()
    )
    assert arms == evaluate.ode_arms(settings)
    with pytest.raises(Exception, match="learning_rate"):
        benchmarks.prepare_benchmark(
            where,
            benchmarks.load_benchmark_task("pocket:test"),
            trained / "held",
            ["learning_rate=1"],
        )
    assert paper_tables.paper_benchmark_rows("geneval")[0]["overall"] == 0.66


def test_dpg_asks_a_judge_about_a_runs_images(trained):
    """Drawn, judged, and judged again without a question."""
    table = trained / "dpg_bench.csv"
    texts = enumerate(("a red circle", "two stars"))
    rows = [(f"item{n}", text, 1, "0", "entity - x (y)", f"Is it {text}?") for n, text in texts]
    pd.DataFrame(rows, columns=judged.DPG_COLUMNS).to_csv(table, index=False)
    words = ["evaluate", trained / "run", "--benchmark", "dpg", "--source", table, "--no-report"]
    assert "judge" in run(*words, code=2) and not (trained / "run" / "benchmarks" / "dpg").exists()
    with serve(lambda text, grey: "yes" if "star" in text else "no") as stub:
        words += ["--judge-url", stub.url, "--judge-model", "stub"]
        first = run(*words)
        asked = sum(stub.came.values())
        assert (
            run(*words).splitlines()[-8:] == first.splitlines()[-8:]
            and sum(stub.came.values()) == asked == 3 * 2
        )
    summary = read_json(trained / "run" / "benchmarks" / "dpg" / "summary.json")
    assert [summary["overall"][arm]["mean"] for arm in ("base", "plain", "hybrid")] == [0.5] * 3
    assert summary["overall"]["plain-base"]["mean"] == 0 and "not comparable" in summary["label"]
    assert [row["arm"] for row in summary["paper"]["dpg"]][:2] == ["FLUX.1-dev", "Dance-GRPO"]


@pytest.mark.parametrize("name", ["wise", "dpg"])
def test_number_of_images_of_a_judged_benchmark_cannot_be_changed(name, tmp_path):
    with pytest.raises(InputError, match=f"`samples` must be 1 or left out for {name}.*; got 4"):
        benchmarks.load_benchmark_task(name, tmp_path, samples=4)


JUDGE = Judge("http://127.0.0.1:9/v1", "stub")
TASKS = {
    "wise": benchmarks.WISETask("wise", ("a",), 1, ("culture",), (1,)),
    "dpg": benchmarks.DPGTask("dpg", ("a",), 1, (), ("x",)),
    "geneval": benchmarks.GenEvalTask("geneval", ("a",), 1, records=({},)),
    "list": benchmarks.BenchmarkTask("list", ("a",), 1),
}


@pytest.mark.parametrize(
    "name, scorers, tools, option",
    [
        ("wise", {"bright": len}, {"judge": JUDGE}, "rewards"),
        ("dpg", {"bright": len}, {"judge": JUDGE}, "rewards"),
        ("wise", {}, {"judge": JUDGE, "detector": "d"}, "detector"),
        ("dpg", {}, {"judge": JUDGE, "detector": "d"}, "detector"),
        ("dpg", {}, {"judge": JUDGE, "rubric": "r.txt"}, "rubric"),
        ("geneval", {}, {"judge": JUDGE, "detector": "d"}, "judge"),
        ("list", {"bright": len}, {"detector": "d"}, "detector"),
    ],
)
def test_option_without_effect_on_a_benchmark_is_rejected(name, scorers, tools, option, tmp_path):
    with pytest.raises(InputError, match=f"^`{option}` must be left out for {name}"):
        benchmarks.score_benchmark(TASKS[name], {}, tmp_path / "out", scorers=scorers, tools=tools)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--judge-url", "http://127.0.0.1:9/v1"], "`--judge-url` and `--judge-model`"),
        (["--judge-model", "stub"], "`--judge-url` and `--judge-model`"),
        (["--judge-key", "KEY"], "`--judge-key` must go with"),
    ],
)
def test_incomplete_judge_is_rejected(options, expected, tmp_path):
    result = CliRunner().invoke(
        evaluation_app, ["--benchmark", "wise", "--images", f"plain={tmp_path}", *options]
    )
    assert isinstance(result.exception, InputError)
    assert expected in str(result.exception)


REWARD = """
from chunk_grpo.rewards.images import images_to_tensor


class Grey:
    def __init__(self, factor=1.0):
        self.factor = factor

    def __call__(self, images, prompts):
        return self.factor * 255 * images_to_tensor(images)[:, 0, 0, 0]

    def category(self, prompt):
        return prompt.split()[0]

    def objects(self, images, prompts):
        return [[level > 50 / 255] for level in images_to_tensor(images)[:, 0, 0, 0].tolist()]
"""


def grey_list(folder, prompts=("one star", "one moon", "two stars")):
    """Return a benchmark of three prompts, and the folders of two arms with one grey image per prompt."""
    arms = {arm: folder / arm for arm in ("base", "plain")}
    for arm, images_folder in arms.items():
        images_folder.mkdir(parents=True, exist_ok=True)
        for n, level in enumerate((0, 40, 100)):
            colour = (level + 20 * (arm == "plain"),) * 3
            Image.new("RGB", (4, 4), colour).save(images_folder / f"{n:05d}_0.png")
    return benchmarks.BenchmarkTask("list", prompts, 1), arms


def test_a_reward_of_your_own_gets_tensors_as_in_training(tmp_path):
    """Also in a benchmark, whose images are files."""
    file = tmp_path / "my_rewards.py"
    file.write_text("def redness(images, prompts):\n    return images[:, 0].mean((1, 2))\n")
    task, arms = grey_list(tmp_path)
    scorers = {f"{file}:redness": placement.load_placed_reward(f"{file}:redness")}
    summary = benchmarks.score_benchmark(task, arms, tmp_path, scorers=scorers)
    mean = summary["rewards"][f"{file}:redness"]["base"]["mean"]
    assert mean == pytest.approx((0 + 40 + 100) / 3 / 255, abs=1e-6)


@pytest.mark.parametrize("name", ["plain-base", "overall"])
def test_names_of_images_that_the_summary_needs_are_rejected(tmp_path, name):
    task, arms = grey_list(tmp_path)
    with pytest.raises(InputError, match=f"must not end in -base, .* none of categories.*{name}"):
        benchmarks.score_benchmark(task, {name: arms["plain"]}, tmp_path, scorers={"a": len})


def test_scores_are_renewed_if_prompts_options_or_code_changed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "grey_reward.py"
    file.write_text(REWARD)
    name = f"{file}:Grey"
    task, arms = grey_list(tmp_path)
    calls = []

    def score(task=task, options=None):
        """Score, and return the number of images that were scored in this call."""
        calls.clear()
        reward = placement.load_placed_reward(name, **(options or {}))

        def counted(images, prompts):
            calls.extend(prompts)
            return reward(images, prompts)

        benchmarks.score_benchmark(
            task, arms, tmp_path, scorers={name: counted}, reward_options={name: options or {}}
        )
        return len(calls)

    assert (score(), score()) == (6, 0)
    other, _ = grey_list(tmp_path, ("one star", "one sun", "two stars"))
    assert (score(other), score(other)) == (2, 0)
    assert (score(other, {"factor": 2.0}), score(other, {"factor": 2.0})) == (6, 0)
    file.write_text(REWARD + "\n# another version\n")
    assert (score(other, {"factor": 2.0}), score(other, {"factor": 2.0})) == (6, 0)
    # Records of earlier versions name no scorer.
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    old = [{k: v for k, v in line.items() if k != "scorer_sha256"} for line in lines]
    (tmp_path / "scores.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    assert score(other, {"factor": 2.0}) == 6


def test_a_rewards_categories_and_objects_count_in_a_benchmark_as_in_an_evaluation(tmp_path):
    names = {}
    exec(REWARD, names)
    task, arms = grey_list(tmp_path)
    summary = benchmarks.score_benchmark(task, arms, tmp_path, scorers={"grey": names["Grey"]()})
    grey = summary["rewards"]["grey"]
    assert grey["categories"]["base"] == {"one": 20, "two": 100}
    assert grey["base"]["mean"] == grey["overall"]["base"] == 60  # of categories, not of prompts
    assert grey["preserved"]["plain"]["objects"]["gained"]["share"] == 0.5
    own = benchmarks.BenchmarkTask("list", task.prompts, 1, ("a", "b", "b"))
    (tmp_path / "scores.jsonl").unlink()
    summary = benchmarks.score_benchmark(own, arms, tmp_path, scorers={"grey": names["Grey"]()})
    assert summary["rewards"]["grey"]["categories"]["base"] == {"a": 0, "b": 70}


def test_questions_without_rows_are_one_sentence(tmp_path):
    (tmp_path / "dpg_bench.csv").write_text(",".join(judged.DPG_COLUMNS) + "\n")
    with pytest.raises(InputError, match="`questions` must have at least one question; .* no rows"):
        benchmarks.load_benchmark_task("dpg", tmp_path / "dpg_bench.csv")


def test_rewards_of_a_benchmark_take_options(tmp_path):
    _, arms = grey_list(tmp_path)
    (tmp_path / "three.txt").write_text("one star\none moon\ntwo stars\n")
    (tmp_path / "grey.py").write_text(REWARD)
    pairs = [word for arm, folder in arms.items() for word in ("--images", f"{arm}={folder}")]
    name = f"{tmp_path / 'grey.py'}:Grey"
    means = []
    for factor in (1, 3):
        out = tmp_path / f"out-{factor}"
        options = json.dumps({name: {"factor": factor}})
        words = ["evaluate", "--benchmark", tmp_path / "three.txt", "--samples", "1", *pairs]
        run(
            *words,
            "--rewards",
            name,
            "--reward-options",
            options,
            "--out",
            out,
            "--no-report",
        )
        means.append(read_json(out / "summary.json")["rewards"][name]["base"]["mean"])
    assert means[1] == pytest.approx(3 * means[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("{clip: {weights: x}}", "`reward_options` must name only compressibility; got 'clip'"),
        ("[1]", "`--reward-options` must be a mapping"),
        ("{compressibility: {qualty: 5}}", "qualty"),
    ],
)
def test_options_of_a_reward_that_cannot_be_used_are_rejected(tmp_path, options, sentence):
    _, arms = grey_list(tmp_path)
    (tmp_path / "three.txt").write_text("one star\none moon\ntwo stars\n")
    words = ["--benchmark", str(tmp_path / "three.txt"), "--images", f"base={arms['base']}"]
    words += ["--rewards", "compressibility", "--reward-options", options]
    answer = CliRunner().invoke(evaluation_app, [*words, "--out", str(tmp_path / "out")])
    assert isinstance(answer.exception, InputError) and sentence in str(answer.exception)


def test_geneval_takes_detector_and_clip_of_the_run_or_of_the_command(
    trained, tmp_path, monkeypatch
):
    """A host without a network names both in the run's settings, or with --detector and --clip."""
    loaded = []

    def note(kind):
        """Return a function that notes the folder, and stops the benchmark once the second is loaded."""

        def load(name, *_):
            loaded.append((kind, str(name)))
            if kind == "clip":
                raise InputError("enough")

        return load

    monkeypatch.setattr(benchmarks.detector, "load_detector", note("detector"))
    monkeypatch.setattr(benchmarks.detector, "load_colour_classifier", note("clip"))
    record = {"tag": "counting", "include": [{"class": "bench", "count": 2}], "prompt": "benches"}
    (tmp_path / "few.jsonl").write_text(json.dumps(record) + "\n")
    options = {"geneval": {"detector": "/d", "clip": "/c"}}
    changes = {"eval_rewards": ["geneval"], "reward_options": options}
    for tools in ({}, {"clip": "/mine", "detector": ""}):
        with pytest.raises(InputError, match="enough"):
            benchmarks.run_benchmark(
                trained / "run",
                "geneval",
                source=tmp_path / "few.jsonl",
                changes=changes,
                tools=tools,
                processes=1,
            )
    assert loaded == [("detector", "/d"), ("clip", "/c"), ("detector", "/d"), ("clip", "/mine")]
