"""What a person reads in reports: every label is of its line, every number of its evaluation, every sentence true."""

import json
import math
import re
import shutil
import zlib
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import synthetic
from matplotlib.text import Text
from PIL import Image
from report_functions import functions_of_report
from typer.testing import CliRunner

from chunk_grpo import InputError
from chunk_grpo.cli import evaluation as commands
from chunk_grpo.cli import main
from chunk_grpo.core.settings import reward_weights
from chunk_grpo.planning import devices
from chunk_grpo.planning.devices import measure_matmul_rate
from chunk_grpo.pocket.world import Scene, SceneObject, render_scene
from chunk_grpo.reporting import figures, reports, samples, tables
from chunk_grpo.runs import run_folder

LONG = "l" * 200
compare = functions_of_report("compare")
train = functions_of_report("train")


def labels(figure) -> list[str]:
    """All texts of a figure that is drawn."""
    figure.canvas.draw()
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def metrics(chunks: int = 4, never: tuple = ()):
    """Metrics of ten iterations, with two rewards, some chunks never drawn."""
    rng = np.random.default_rng(0)
    rows = [{"iteration": 0}]
    for i in range(1, 11):
        values = [None if k in never else float(rng.uniform(0.01, 0.3)) for k in range(chunks)]
        rows.append(
            {
                "iteration": i,
                "reward_mean": 0.1 * i,
                "reward_se": 0.01,
                "reward_a": 0.05 * i,
                "reward_b": 1.0,
                "clip_fraction": values,
                "ratio_dev": values,
            }
        )
    return pd.DataFrame(rows)


@pytest.mark.parametrize("words", [r"$\frac$", "$x_1$", r"a \$5 and $6$"])
def test_words_between_dollars_are_words_in_every_figure_of_names(words, tmp_path):
    """Prompts, rewards, runs: drawn, and not typeset."""
    image = {
        "prompt": words,
        "number": 0,
        "arm": "base",
        "seed": 0,
        "image": Image.new("RGB", (8, 8)),
    }
    assert samples._draw_contact_sheet([image]).startswith(b"\x89PNG")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = pd.DataFrame(
        [
            {"arm": arm, "prompt": words, "seed": 0, "image_index": 0, "file": "a.png"}
            for arm in ("base", "plain")
        ]
    )
    table = pd.DataFrame([{"letter": "A", "label": words, "delta": 0.1, "lo": 0.0, "hi": 0.2}])
    one = metrics().rename(columns={"reward_a": f"reward_{words}"})
    settings = SimpleNamespace(
        iterations=10,
        chunks="2,3,4,7",
        chunk_weighting="uniform",
        reward=words,
        eval_rewards=(),
        reward_options={},
    )
    lines = [{"iteration": 1, f"eval_{words}": 0.5}]
    made = [
        compare.plot_run_images({words: (tmp_path, rows)}),
        compare.plot_comparison(table, words, {"A": "red"}),
        compare.plot_reward_curves({words: [one]}, {words: "red"}),
        train.plot_reward(one, {words: 1.0, "b": 1.0}),
        figures.plot_progress(lines, settings),
    ]
    for figure in made:
        assert any(words in text for text in labels(figure))
        assert not [t for t in figure.findobj(Text) if words in t.get_text() and t.get_parse_math()]


def test_each_line_of_the_clip_figure_has_its_own_name_and_a_chunk_without_a_line_has_none():
    figure = train.plot_clipping(metrics(never=(0,)), (2, 3, 4, 7), 1e-3)
    (legend,) = figure.legends
    shades = [line.get_color() for line in legend.get_lines()]
    named = dict(zip([text.get_text() for text in legend.get_texts()], shades, strict=True))
    assert list(named) == ["2\u20134", "5\u20138", "9\u201315"]
    drawn = {
        line.get_label(): line.get_color()
        for line in figure.axes[1].lines
        if line.get_label() in named
    }
    assert {k: tuple(v) for k, v in drawn.items()} == {k: tuple(v) for k, v in named.items()}


@pytest.mark.slow
def test_a_run_whose_method_has_other_metrics_gets_its_report_comparison_and_live_figure(
    whole, tmp_path
):
    """No ratio and no clip; a width, a loss a chunk, and text that nobody can draw."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        for name in [name for name in line if name.startswith(("ratio", "clip_fraction", "kl"))]:
            line.pop(name)
        line |= {"window_width": 4.0 - i, "loss_by_chunk": [0.1 * i, None], "stage": "first"}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = reports.write_run_report(run).read_text()
    assert "This run measured no clipped ratio" in page and "What else the method measured" in page
    table = train.plot_method_metrics(run_folder.read_metrics(run))
    assert [axis.get_title(loc="left") for axis in table.axes[:2]] == [
        "window width",
        "loss by chunk",
    ]
    (name, *_), value = (
        reward_weights(run_folder.read_run_settings(run)),
        {"mean": 0.1, "lo": 0.0, "hi": 0.2},
    )
    summary = {
        "n_prompts": 4,
        "images_per_prompt": 1,
        "steps": 5,
        "resolution": 64,
        "split": 0,
        "rewards": {name: {"base": value, "plain": value, "plain-base": value}},
    }
    for folder in (run, shutil.copytree(whole, tmp_path / "other")):
        (folder / "evaluation").mkdir()
        (folder / "evaluation/summary.json").write_text(json.dumps(summary))
    both = [str(run), str(tmp_path / "other")]
    assert reports.write_report("compare", tmp_path / "compare.html", runs=both).is_file()
    figure = figures.plot_progress(
        run_folder.read_metrics_lines(run), run_folder.read_run_settings(run)
    )
    assert figure.axes[1].get_ylabel() == "norm of the gradient"
    bare = [{"iteration": line["iteration"]} for line in lines]
    assert (
        train.plot_clipping(pd.DataFrame(bare), (2, 3)) is None
        and train.plot_method_metrics(pd.DataFrame(bare)) is None
    )
    assert (
        figures.plot_progress(bare, run_folder.read_run_settings(run))
        and train.plot_gradient_norm(pd.DataFrame(bare)) is None
    )


def test_chunks_that_follow_the_profile_may_change_in_number(monkeypatch):
    """With `profile_every`, later iterations may have fewer or more chunks: every figure still draws them."""
    rows = metrics()
    rows = rows.astype(object)
    for name in ("clip_fraction", "ratio_dev"):
        rows[name] = [
            values[:3] if i < 5 and isinstance(values, list) else values
            for i, values in enumerate(rows[name])
        ]
    lines = [row.dropna().to_dict() for _, row in rows.iterrows()]
    settings = SimpleNamespace(
        iterations=10,
        chunks="adaptive",
        chunk_weighting="uniform",
        reward="a",
        eval_rewards=(),
        reward_options={},
    )
    live = figures.LiveFigure(settings, interval=0)
    shown = []
    monkeypatch.setattr(figures, "display", lambda *args, **more: shown.append(args))
    for line in lines:
        live(line)
    assert shown and figures.plot_progress(lines, settings)
    figure = train.plot_clipping(rows, (5, 5, 6), 1e-3)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["1", "2", "3", "4"]
    assert legend.get_title().get_text() == "chunk"
    assert train.plot_method_metrics(rows.rename(columns={"clip_fraction": "own"}))
    assert figures.stack_lists([[1, None], [2]]).tolist()[1][0] == 2 and not len(
        figures.stack_lists([])
    )


def test_a_figure_that_cannot_be_drawn_does_not_end_a_training(monkeypatch):
    settings = SimpleNamespace(iterations=10, reward="a", eval_rewards=(), reward_options={})
    live = figures.LiveFigure(settings, interval=0)
    monkeypatch.setattr(figures, "plot_progress", lambda *args: 1 / 0)
    with pytest.warns(UserWarning, match="the live figure was not drawn .ZeroDivisionError"):
        live({"iteration": 1})


@pytest.mark.parametrize("harm", ["half", "empty", "text", "missing", "folder", "huge"])
def test_a_damaged_image_of_a_run_is_one_sentence(tmp_path, harm):
    file = tmp_path / "00000_0.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(
        file
    )
    whole = file.read_bytes()
    size = (60_000).to_bytes(4, "big") * 2 + whole[24:29]
    huge = whole[:16] + size + zlib.crc32(b"IHDR" + size).to_bytes(4, "big") + whole[33:]
    file.unlink()
    if harm == "folder":
        file.mkdir()
    elif harm != "missing":
        file.write_bytes(
            {"half": whole[: len(whole) // 2], "empty": b"", "text": b"red", "huge": huge}[harm]
        )
    with pytest.raises(
        InputError, match="the images of a run must be readable; got .*00000_0.png: "
    ):
        figures.plot_image_grid([[file]], ["a red star"], ["base"])


@pytest.mark.parametrize(
    ("name", "edit", "words"),
    [
        (
            "evaluation/summary.json",
            lambda x: x["rewards"]["pocket-geneval"]["plain-base"].pop("lo"),
            "lo",
        ),
        (
            "evaluation/summary.json",
            lambda x: x["rewards"]["pocket-clip"]["plain"].update(hi="x"),
            "hi",
        ),
        ("evaluation/summary.json", lambda x: x["rewards"]["pocket-clip"].pop("base"), "base"),
        (
            "evaluation/summary.json",
            lambda x: x["rewards"]["pocket-clip"].update(plain=None),
            "plain",
        ),
        ("profile.json", lambda x: x.update(eta="x"), "eta"),
        ("profile.json", lambda x: x.update(chunks="x"), "chunks"),
        (
            "metrics.jsonl",
            lambda x: x.update(advantage_std_zero_groups="x"),
            "advantage_std_zero_groups",
        ),
        ("metrics.jsonl", lambda x: x.update(ratio_max_dev=[1.0]), "ratio_max_dev"),
        ("metrics.jsonl", lambda x: x.update(ratio_dev="x"), "ratio_dev"),
        ("metrics.jsonl", lambda x: x.update({"reward_pocket-clip": [1]}), "reward_pocket-clip"),
        ("metrics.jsonl", lambda x: x.update({"eval_pocket-clip": "high"}), "eval_pocket-clip"),
    ],
)
def test_numbers_of_a_run_that_are_none_are_one_sentence(tmp_path, name, edit, words):
    run = synthetic.write(tmp_path / "run")
    first, *rest = (
        (run / name).read_text().splitlines() if name.endswith("l") else [(run / name).read_text()]
    )
    edit(content := json.loads(first))
    (run / name).write_text("\n".join([json.dumps(content), *rest]) + "\n")
    with pytest.raises(InputError, match=f"is damaged: .*{words}"):
        run_folder.read_evaluation_summary(run)
        run_folder.read_run_profile(run)
        run_folder.read_metrics(run)


def test_a_run_on_two_rewards_shows_both():
    figure = train.plot_reward(metrics(), {"a": 1.0, "b": 0.5})
    total, a, b = figure.axes
    assert total.lines[0].get_ydata()[-1] == pytest.approx(0.5 + 0.5 * 1.0), (
        "the sum of both, not the first"
    )
    assert (a.get_title(loc="left"), b.get_title(loc="left")) == ("a", "b")
    assert a.lines[0].get_ydata()[-1] == pytest.approx(0.5) and b.lines[0].get_ydata()[-1] == 1.0


def test_a_name_of_300_letters_covers_nothing():
    name = "x" * 300
    value = {"mean": 0.1, "lo": 0.0, "hi": 0.2}
    table = metrics().assign(**{f"eval_{name}": 0.5, f"reward_{name}": 0.5})
    rows = pd.DataFrame([{"letter": "A", "label": "A1", "delta": 0.1, "lo": 0.0, "hi": 0.2}])
    made = [
        train.plot_reward(table, {name: 1.0, "b": 1.0}, [name]),
        train.plot_heldout(table, [name]),
        train.plot_reward(table, {name: 1.0}),
        figures.plot_deltas({name: {"plain-base": value}}),
        figures.plot_categories({"base": {"a": 0.1}, "plain": {"a": 0.2}}, name),
        compare.plot_comparison(rows, name, {"A": "red"}),
    ]
    for figure in made:
        assert (
            any("xxx ... xxx" in text for text in labels(figure))
            and max(map(len, labels(figure))) < 80
        )


def test_what_rose_and_fell_is_said_of_each_kind_of_weights():
    up = {"mean": 0.2, "lo": 0.1, "hi": 0.3}
    down = {"mean": -0.25, "lo": -0.4, "hi": -0.1}
    row = {"base": up, "plain": down, "plain-base": down, "as-trained": up, "as-trained-base": up}
    said = tables.describe_directions({"clip": row})
    assert said == "trained: clip fell; as trained: clip rose"
    assert "the largest fall counting with \u22120.250" in tables.describe_extremes(
        {"counting": -0.25, "colors": 0.1}
    )
    assert tables.describe_extremes({"counting": -0.25}).startswith("nothing rose")


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Two runs of one method with different learning rates, one with a long name and another evaluation."""
    folder = tmp_path_factory.mktemp("runs")
    a = synthetic.write(folder / "short", {"learning_rate": 1e-4})
    b = synthetic.write(folder / LONG, {"learning_rate": 2e-4}, gain=0.2)
    summary = run_folder.read_evaluation_summary(b) | {"steps": 5, "resolution": 128}
    (b / "evaluation/summary.json").write_text(json.dumps(summary))
    return a, b


def test_runs_are_told_apart_and_unequal_evaluations_are_named(unequal):
    table = reports.compare_runs(unequal)
    assert table.drop_duplicates("label").label.tolist() == ["A1", "B1"]
    colours = compare.group_colours(dict(zip(table.letter, table.method, strict=True)))
    assert colours["A"] != colours["B"]
    part = table[table.reward == "pocket-clip"]
    figure = compare.plot_comparison(part, "pocket-clip", colours)
    assert not [text for text in labels(figure) if "lll" in text]
    steps = run_folder.read_evaluation_summary(unequal[0])["steps"]
    said = reports.describe_evaluation_differences(unequal)
    assert (
        f"differ in steps of the ODE (A1 {steps}, B1 5); resolution in pixels (A1 64, B1 128), so"
        in said
    )
    assert reports.describe_evaluation_differences(unequal[:1] * 2) == ""


def test_a_guidance_that_the_summary_leaves_out_is_that_of_training(tmp_path):
    """A summary names the guidance only if it is not the one of training."""
    a = synthetic.write(tmp_path / "a", {"guidance": 3.5})
    b = synthetic.write(tmp_path / "b", {"guidance": 1.0})
    said = reports.describe_evaluation_differences([a, b])
    assert "differ in guidance (A1 [3.5, 1.0], B1 [1.0, 1.0]), so" in said
    summary = run_folder.read_evaluation_summary(b) | {"guidance": [3.5, 1.0]}
    (b / "evaluation/summary.json").write_text(json.dumps(summary))
    assert reports.describe_evaluation_differences([a, b]) == ""


def test_the_time_to_a_gain_leaves_evaluations_out(tmp_path):
    table = pd.DataFrame(
        {
            "iteration": [0, 1, 2, 3],
            "reward_mean": [None, 0.1, 0.2, 0.3],
            "eval_a": [0.5, 0.6, None, 0.8],
            "seconds_total": [None, 15.0, 25.0, 40.0],
            "seconds_evaluate": [None, 5.0, None, 5.0],
        }
    )
    assert reports.training_seconds(table).tolist()[1:] == [10, 20, 30]
    assert reports.seconds_to_gain(table, "a", 0.1) == pytest.approx(10)
    assert reports.seconds_to_gain(table, "a", 0.3) == pytest.approx(30)
    figure = compare.plot_reward_curves({"A": [table]}, {"A": "red"})
    _, by_time = figure.axes
    assert by_time.lines[0].get_xdata().tolist() == [10, 20, 30]
    bare = table.drop(columns=["seconds_total", "seconds_evaluate"])
    assert compare.plot_reward_curves({"A": [bare]}, {"A": "red"})


def test_compare_prints_what_cannot_be_compared_before_the_table(unequal, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "write_report", lambda name, out, **_: out)
    page = tmp_path / "page.html"
    answer = CliRunner().invoke(main.app, ["compare", *map(str, unequal), "--out", str(page)])
    assert answer.exit_code == 0, answer.output
    assert answer.output.index("their scores cannot be compared") < answer.output.index("delta")
    same = [str(unequal[0])] * 2
    answer = CliRunner().invoke(main.app, ["compare", *same, "--out", str(page)])
    assert answer.exit_code == 0 and "cannot be compared" not in answer.output


@pytest.mark.slow
def test_the_page_of_a_comparison_warns_and_shows_images(unequal, tmp_path):
    page = reports.write_report(
        "compare", tmp_path / "page.html", runs=list(map(str, unequal))
    ).read_text()
    assert 'class="warning"' in page
    assert page.count("their scores cannot be compared") == 1
    assert page.index("their scores cannot be compared") < page.index("interval lies above 0"), (
        "what cannot be compared comes before the numbers"
    )
    text = re.sub(r"data:image[^\"]+", "", page)
    assert text.count(LONG) == 1, "the long name stands in the table of the runs alone"
    assert "the trained weights of each" in text and "learning_rate" in text


def test_a_new_evaluation_renews_the_report_that_shows_the_old_one(tmp_path, monkeypatch, capsys):
    run = synthetic.write(tmp_path / "run")
    written = []
    summary = run_folder.read_evaluation_summary(run)
    monkeypatch.setattr(commands, "evaluate_with_progress", lambda *_, **__: summary)
    monkeypatch.setattr(
        reports,
        "write_run_report",
        lambda run, name="train", checkpoint=None: written.append((name, checkpoint)),
    )
    commands.evaluate_and_print(run, [], 0)
    (run / "report.html").write_text("the scores before")
    commands.evaluate_and_print(run, [], 0)
    assert written == [("evaluate", None), ("evaluate", None), ("train", None)]
    assert "renewed" in capsys.readouterr().out
    # The report of the training does not show the evaluation of a checkpoint.
    commands.evaluate_and_print(run, [], 0, checkpoint=20)
    assert written[3:] == [("evaluate", 20)]


def test_the_checkers_no_has_its_reason(tmp_path):
    things = (SceneObject("star", "red", 20, 20, 12), SceneObject("ring", "blue", 46, 46, 12))
    render_scene(Scene("", things)).save(tmp_path / "a.png")
    row = {
        "arm": "plain",
        "prompt_index": 0,
        "image_index": 0,
        "prompt": "a red star",
        "file": "a.png",
    }
    rows = pd.DataFrame([row | {"scores": {"pocket-geneval": 0.0}}])
    assert figures.detector_notes(rows, tmp_path) == [
        "a red star, trained: it sees a red star, a blue ring"
    ]
    assert figures.detector_notes(rows.assign(scores=[{"pocket-geneval": 1.0}]), tmp_path) == []


def test_the_least_time_holds_on_a_machine_that_others_use(monkeypatch):
    """A process that waits ten seconds for each look at the wall's clock has the rate of its own core's time."""
    free = measure_matmul_rate(seconds=0.05)
    wall = iter(range(0, 10**6, 10))
    monkeypatch.setattr(devices.time, "perf_counter", lambda: float(next(wall)))
    busy = measure_matmul_rate(seconds=0.05)
    monkeypatch.undo()
    assert busy > free / 20 and math.isfinite(busy)  # by the wall it would be less than a hundredth
