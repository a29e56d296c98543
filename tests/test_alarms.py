"""What alarms say of metrics, and of which they say nothing."""

from types import SimpleNamespace

import pytest

from chunk_grpo.core.settings import load_settings
from chunk_grpo.training import credit_assignment, trainer
from chunk_grpo.training.callbacks import (
    Callback,
    StopTraining,
    alarm_history,
    raised_alarms,
)

S = load_settings({"updates_per_iteration": 2, "prompts_per_iteration": 4, "clip_range": 1e-4})
RISING = [i / 20 for i in range(12)]
STILL = [0.5 + 0.01 * (i % 2) for i in range(12)]
GROWN = [1 + 0.01 * (i % 2) + (0.7 if i > 5 else 0) for i in range(12)]


def told(lines, settings=S) -> list:
    """The alarms of metrics after the base's line, as (iteration, name)."""
    lines = [{"iteration": i, "reward_mean": 0.5} | line for i, line in enumerate(lines, 1)]
    return [
        (row["iteration"], row["alarm"])
        for row in alarm_history([{"iteration": 0}, *lines], settings)
    ]


def run_of(rewards, held_out=(0.5, 0.5), **more):
    """Metrics with these rewards, and the held-out score x of the base and of the end."""
    lines = [
        {"iteration": i, "reward_mean": x, **{k: v[i - 1] for k, v in more.items()}}
        for i, x in enumerate(rewards, 1)
    ]
    ends = [
        {"eval_x": score, "eval_x_se": 0.01, "eval_x_hybrid": 0, "eval_x_hybrid_se": 0}
        for score in held_out
    ]
    return [{"iteration": 0} | ends[0], *lines[:-1], lines[-1] | ends[1]]


def names(lines) -> list[str]:
    return [row["alarm"] for row in alarm_history(lines, S)]


def test_what_holds_in_three_iterations_is_said_once():
    clipped = {"clip_fraction": [0.5, 0.4, None]}
    flat = {"advantage_std_zero_groups": 4}
    assert told([clipped] * 2) == told([flat] * 2) == []
    assert told([clipped] * 6) == [(3, "clip_fraction")] and told([flat] * 6) == [
        (3, "flat_groups")
    ]
    assert told([clipped] * 6, S.model_copy(update={"updates_per_iteration": 1})) == []
    assert told([flat, flat, {"advantage_std_zero_groups": 3}]) == []
    assert (
        told([{"ratio_floor": 2e-5}]) == [(1, "ratio_floor")]
        and told([{"ratio_floor": 9e-6}]) == []
    )


def test_an_alarm_names_the_setting_that_limits_the_ratio():
    clipped = {"clip_fraction": [0.5, 0.4, None]}

    def warnings(line, surrogate, iterations=1):
        settings = S.model_copy(update={"surrogate": surrogate})
        lines = [{"iteration": i, "reward_mean": 0.5} | line for i in range(1, iterations + 1)]
        return raised_alarms(lines, settings)

    asymmetric = "asymmetric:1e-5:2e-4"
    assert warnings(clipped, "clip", 3)["clip_fraction"].endswith("for `clip_range` 0.0001")
    for surrogate in (asymmetric, "dppo:1e-6"):
        assert warnings(clipped, surrogate, 3)["clip_fraction"].endswith(
            f"for `surrogate` {surrogate}"
        )
    # Only a clip of the ratio responds to an error of the ratio: here below a tenth of 1e-4, above one of 1e-5.
    floor = {"ratio_floor": 2e-6}
    assert warnings(floor, "clip") == warnings({"ratio_floor": 1.0}, "hinge:1e-4") == {}
    assert warnings(floor, asymmetric)["ratio_floor"].endswith(f"range of `surrogate` {asymmetric}")


def test_a_gradient_explodes_only_where_it_jumps_and_stays():
    norms = [{"grad_norm": x} for x in (1, 2, 1, 2, 1, 1, 30, 40, 50)]
    assert told(norms) == [(9, "gradient_norm")]
    assert (
        told([*norms[:-1], {"grad_norm": 2}])
        == told([{"grad_norm": 1.2**i} for i in range(60)])
        == []
    )


def test_hacking_needs_a_rise_and_a_fall():
    assert names(run_of(RISING, (0.5, 0.4))) == ["hacking"]
    quiet = run_of(RISING), run_of(RISING, (0.5, 0.49)), run_of(STILL, (0.5, 0.4))
    assert [names(lines) for lines in quiet] == [[], [], []]


def test_images_may_change_a_little_and_a_grid_may_fade():
    assert names(run_of(RISING, image_grid=GROWN)) == ["grid"]
    assert names(run_of(STILL, image_saturation=GROWN[::-1])) == ["saturation"]
    assert names(run_of(RISING, image_grid=GROWN[::-1])) == []
    assert names(run_of(STILL, image_high_frequency=[1 + i / 60 for i in range(12)])) == []
    both = run_of(RISING, (0.5, 0.4), image_grid=GROWN)
    assert (
        names(both) == ["grid", "hacking"]
        and raised_alarms([*both, both[-2] | {"iteration": 13}], S) == {}
    )


@pytest.mark.parametrize("local", [None, "here"])
@pytest.mark.parametrize("sharded", [False, True])
def test_all_processes_stop_together(tmp_path, monkeypatch, local, sharded):
    """Shards need all of them, and the launcher would end one that still writes once another has ended."""

    class Stops(Callback):
        def on_log(self, state, line):
            if local:
                raise StopTraining(local)

    state = SimpleNamespace(
        settings=load_settings("pocket/tiny", {"stop_on": []}),
        run=tmp_path,
        accelerator=SimpleNamespace(
            is_main_process=False,
            process_index=1,
            wait_for_everyone=lambda: saved.append("waited"),
        ),
        rewards={},
        executor=SimpleNamespace(shutdown=lambda cancel_futures: None),
        policy=SimpleNamespace(sharded=sharded),
        iteration=0,
    )

    def train_iteration(state):
        state.iteration += 1
        return {"iteration": state.iteration}

    saved = []
    monkeypatch.setattr(trainer, "prepare_state", lambda settings, run: state)
    monkeypatch.setattr(trainer, "Logger", lambda log: Callback())
    monkeypatch.setattr(trainer, "Alarms", lambda log: Callback())
    monkeypatch.setattr(trainer, "evaluate_held_out", lambda state: {})
    monkeypatch.setattr(trainer, "train_iteration", train_iteration)
    for name in (
        "load_policy_and_optimizer",
        "resume",
        "repeat_failed_evaluation",
        "check_weights_are_finite",
    ):
        monkeypatch.setattr(trainer, name, lambda *_: None)
    monkeypatch.setattr(trainer, "save_checkpoint", lambda state: saved.append(state.iteration))
    state.iteration = 1  # resumed, so the base is not evaluated
    # Another process stops in iteration 2.
    monkeypatch.setattr(
        credit_assignment,
        "gather_object",
        lambda local: [*local, (StopTraining, "there") if state.iteration == 2 else None],
    )
    with pytest.raises(StopTraining, match=local or "there"):
        trainer.train_run(state.settings, tmp_path, [Stops()])
    assert state.iteration == 2 and saved == [2, "waited"]
