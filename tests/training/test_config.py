"""Configurations: files, flags and plans; every fault named before a device is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from pipeline import plan
from pipeline.cli import main as cli
from pipeline.cli.run import make_model
from pipeline.training.config import Config, RunConfigError, rates, rules
from tests.support.refusals import refusal

ROOT = Path(__file__).parents[2]
LEAST: dict[str, Any] = {
    "model": {"function": "tests.training.runnable:parts"},
    "data": {"function": "tests.training.runnable:data"},
    "run": {"steps": 3},
}
PARALLEL = {"stage": 2, "num_microbatches": 2}


def over(*tables: dict[str, Any]) -> dict[str, Any]:
    """The least configuration with others over it, section by section."""
    found = {name: dict(section) for name, section in LEAST.items()}
    for table in tables:
        for name, section in table.items():
            found[name] = found.get(name, {}) | section
    return found


def test_the_least_configuration():
    config = Config.from_dict(LEAST)
    assert (config.run.steps, config.run.folder, config.optimizer.name) == (3, "out", "adamw")
    assert config.parallel is None
    assert json.loads(json.dumps(config.to_dict()))["run"]["keep"] == 3


def test_files_and_settings_win_in_order(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text(
        """
        [model]
        function = "tests.training.runnable:parts"
        arguments = {layers = 2}
        [data]
        function = "tests.training.runnable:data"
        [run]
        steps = 3
        [optimizer]
        clip = 1
        learning_rate = 0.1
        """
    )
    second.write_text("[optimizer]\nlearning_rate = 0.2\nema = 0.9\n")
    given = ["optimizer.learning_rate=1e-3", "optimizer.name=lamb", 'run.folder="a b"']
    config = Config.from_files([first, second], given)
    own = config.optimizer
    assert (own.name, own.learning_rate, own.ema, own.clip) == ("lamb", 1e-3, 0.9, 1.0)
    assert isinstance(own.clip, float)
    assert config.run.folder == "a b"
    assert config.model.arguments == {"layers": 2}


@pytest.mark.slow
def test_what_plan_writes_is_read(tmp_path):
    sizes = {"model": "llama-8b", "devices": 8, "chip": "v5p", "batch": 8, "seq": 2048}
    path = plan(**sizes).write(tmp_path / "plan.toml")
    run = tmp_path / "run.toml"
    run.write_text(
        '[model]\nfunction = "a.b:c"\n[data]\nfunction = "a.b:d"\n[run]\nsteps = 2\n'
        "[parallel]\nstage = 1\n"
    )
    config = Config.from_files([run, path], ["parallel.param_dtype=bfloat16"])
    assert config.parallel is not None
    assert config.parallel.world_size == 8
    assert config.parallel.param_dtype == "bfloat16"
    assert config.parallel.batch_size == 8
    assert config.pipeline.data_parallel in ("zero1", "fsdp")


def test_the_file_says_last_how_a_batch_is_split() -> None:
    """A function's own `batch` and `ignore` hold where the file says nothing."""
    table = {"parallel": {"stage": 2, "num_microbatches": 2, "axes": {"expert": 2, "context": 2}}}
    made = {"function": "tests.training.runnable:with_axes"}
    of_function = make_model(Config.from_dict(over(table, {"model": made})))
    assert of_function.plan.options.batch == P(("data", "expert"), "context")
    assert of_function.plan.options.ignore == ("number", "other")
    file = {"pipeline": {"batch": [["expert"], "context"], "ignore": ["number"]}}
    of_file = make_model(Config.from_dict(over(table | file, {"model": made})))
    assert of_file.plan.options.batch == P(("expert",), "context")
    assert of_file.plan.options.ignore == ("number",)


def test_what_an_optimizer_is_made_of():
    rate = {"name": "linear_schedule", "arguments": {"init_value": 0.0, "end_value": 1.0}}
    rate["arguments"]["transition_steps"] = 2
    given = {"schedule": rate, "name": "adamw", "arguments": {"b2": 0.95}}
    scale = {"loss_scale": "dynamic"}
    half = {"parallel": PARALLEL | {"compute_dtype": "float16"}}
    own = Config.from_dict(over({"optimizer": given | scale}, half)).optimizer
    assert own.loss_scale == "dynamic"
    assert callable(own.transformation().update)
    assert {"adamw", "lamb", "sgd", "muon"} <= set(rules())
    assert "warmup_cosine_decay_schedule" in rates()


FAULTS = [
    ({"optimiser": {}}, "optimiser: there is no such key; did you mean 'optimizer'?"),
    ({"run": {"step": 3}}, "run.step: there is no such key; did you mean 'steps'?"),
    ({"run": {"steps": "3"}}, "run.steps='3': must be a whole number"),
    ({"run": {"steps": True}}, "run.steps=True: must be a whole number"),
    ({"run": {"steps": 0}}, "run.steps=0: must be at least 1"),
    ({"run": {"chip": "v5"}}, "run.chip='v5': there is no such chip; did you mean 'v5p'?"),
    (
        {"optimizer": {"clip": "1", "learning_rate": 0.1}},
        "optimizer.clip='1': must be a number",
    ),
    (
        {"optimizer": {"learning_rate": 0.1, "loss_scale": "automatic"}},
        "optimizer.loss_scale='automatic': must be a number or 'dynamic'",
    ),
    (
        {"optimizer": {"learning_rate": -0.1}},
        "optimizer.learning_rate=-0.1: must be a finite number > 0 of float32",
    ),
    (
        {"optimizer": {"learning_rate": 0.1, "name": "adamww"}},
        "optimizer.name='adamww': optax has no such function; did you mean 'adamw'?",
    ),
    (
        {"optimizer": {"learning_rate": 0.1, "arguments": {"weight_decy": 0.1}}},
        (
            "optimizer.arguments.weight_decy: adamw has no such argument; did you mean "
            "'weight_decay'?"
        ),
    ),
    (
        {"optimizer": {"name": "adamw"}},
        (
            "optimizer.learning_rate and optimizer.schedule: give one of the two, a number or the "
            "name and arguments of a schedule of optax"
        ),
    ),
    (
        {"optimizer": {"schedule": {"name": "cosine_decay_schedule"}}},
        (
            "optimizer.schedule.arguments: cosine_decay_schedule is missing a required argument: "
            "'init_value'"
        ),
    ),
    (
        {"pipeline": {"remat": "all"}, "parallel": PARALLEL},
        "pipeline.remat='all': must be 'stage' or 'gathered' or 'none'",
    ),
    (
        {"pipeline": {"batch": ["data", 2]}, "parallel": PARALLEL},
        "pipeline.batch=['data', 2]: must be a list of texts and lists of texts",
    ),
    (
        {"pipeline": {"auto_axes": ["tensor", ["data"]]}, "parallel": PARALLEL},
        "pipeline.auto_axes=['tensor', ['data']]: must be a list of texts",
    ),
    (
        {"pipeline": {"remat": "none"}},
        "[pipeline] without [parallel]: a pipeline needs parallel.stage at least",
    ),
    (
        {"parallel": PARALLEL, "pipeline": {"costs": {"f": 1, "bb": 2}}},
        "pipeline.costs.bb: there is no such key; did you mean 'b'?",
    ),
    (
        {"parallel": PARALLEL, "pipeline": {"costs": {"f": 1, "host": -1}}},
        (
            "[pipeline.costs] Costs(host=-1): a duration is a finite number >= 0; give the "
            "measured time, in the same unit for all"
        ),
    ),
    (
        {"data": {"pad": True}},
        "data.pad=true: without [parallel] every batch fits; leave it out",
    ),
    (
        {"parallel": {"stage": 2, "stages": 2}},
        "[parallel] unknown key 'stages'; did you mean 'stage'?",
    ),
    (
        {"parallel": {"stage": 2}},
        (
            "parallel.num_microbatches is missing, or batch_size and microbatch_size, from which "
            "it follows"
        ),
    ),
    (
        {"parallel": PARALLEL | {"compute_dtype": "float16"}},
        (
            'parallel.compute_dtype="float16": small gradients vanish without a scale; set '
            'optimizer.loss_scale="dynamic", or compute in bfloat16'
        ),
    ),
    (
        {"parallel": PARALLEL, "optimizer": {"learning_rate": 0.1, "loss_scale": 8}},
        (
            "optimizer.loss_scale=8.0: parallel.compute_dtype is float32, whose gradients do not "
            "vanish; leave it out, or compute in float16"
        ),
    ),
    ({"run": {"best": "min"}}, "run.best='min': there is no [evaluation] to say which is best"),
    (
        {
            "run": {"best": "min", "checkpoint_interval": 4},
            "evaluation": {"function": "a:b", "interval": 3},
        },
        (
            "run.best='min': a checkpoint each 4 updates has no held-out loss where "
            "evaluation.interval=3; give a divisor of 4"
        ),
    ),
    (
        {"evaluation": {"function": "a:b", "ema": True}},
        "evaluation.ema=true: there is no mean; set optimizer.ema, such as 0.999",
    ),
]


@pytest.mark.parametrize(("table", "fault"), FAULTS)
def test_a_fault_is_named(table, fault):
    with pytest.raises(RunConfigError) as caught:
        Config.from_dict(over(table))
    assert caught.value.faults == (fault,)
    assert str(caught.value) == f"the configuration has 1 fault\n- {fault}"


@pytest.mark.parametrize(
    ("model", "faults"),
    [
        (
            {},
            (
                (
                    "model.function and model.weights: give one of the two, the import path of "
                    "what makes a model or the folder of a checkpoint"
                ),
            ),
        ),
        (
            {"function": "a:b", "layout": "EtL"},
            (
                "model.layout='EtL': is for model.weights; without it the function decides",
                (
                    "parallel.num_microbatches is missing, or batch_size and microbatch_size, from "
                    "which it follows"
                ),
            ),
        ),
        (
            {"weights": "x", "arguments": {"a": 1}, "num_stages": 2, "layout": "Et|tL"},
            (
                "model.arguments with model.weights: there is no function to take them",
                (
                    "model.num_stages=2 and model.layout='Et|tL': the layout says how many stages "
                    "there are; give one of the two"
                ),
            ),
        ),
        (
            {"weights": "x", "num_stages": 0, "dtype": "int8", "activations": "float31"},
            (
                "model.num_stages=0: must be at least 1",
                "model.dtype='int8': must be a float type, such as 'bfloat16' or 'float32'",
                (
                    "model.activations='float31': must be a float type, such as 'bfloat16' or "
                    "'float32'"
                ),
            ),
        ),
    ],
)
def test_models_that_are_not_said_well(model, faults):
    parallel = {"stage": 2} | ({} if "function" in model else {"num_microbatches": 2})
    with pytest.raises(RunConfigError) as caught:
        Config.from_dict(over({"parallel": parallel}) | {"model": model})
    assert caught.value.faults == faults


def test_checkpoints_that_cannot_be_read(tmp_path):
    with pytest.raises(RunConfigError) as caught:
        Config.from_dict(LEAST | {"model": {"weights": "x"}})
    assert caught.value.faults == (
        "model.weights without [parallel]: a pipeline needs parallel.stage",
    )
    table = over({"parallel": PARALLEL}) | {"model": {"weights": str(tmp_path)}}
    config = Config.from_dict(table)
    config.check_functions()
    assert refusal(config.source.call) == f"{tmp_path}/config.json is missing"


def test_all_faults_are_named_at_once():
    with pytest.raises(RunConfigError) as caught:
        Config.from_dict({"run": {"steps": "x", "keeps": 1}, "model": 3})
    assert caught.value.faults == (
        "run.steps='x': must be a whole number",
        "run.keeps: there is no such key; did you mean 'keep'?",
        "model=3: must be a table of keys",
        "[data] is missing",
    )


@pytest.mark.parametrize(
    ("function", "arguments", "fault"),
    [
        (
            "runnable",
            {},
            (
                "model.function='runnable': must be the import path of a function, as in "
                "'package.module:function'"
            ),
        ),
        (
            "tests.training.no_module:parts",
            {},
            (
                "model.function='tests.training.no_module:parts': tests.training.no_module cannot "
                "be imported (No module named 'tests.training.no_module'); run where Python finds "
                "it, or set PYTHONPATH"
            ),
        ),
        (
            "tests.training.runnable:part",
            {},
            (
                "model.function='tests.training.runnable:part': tests.training.runnable has no "
                "function 'part'; did you mean 'parts'?"
            ),
        ),
        (
            "tests.training.runnable:parts",
            {"layer": 2},
            "model.arguments.layer: parts has no such argument; did you mean 'layers'?",
        ),
    ],
)
def test_a_function_that_cannot_be_called(function, arguments, fault):
    config = Config.from_dict(over({"model": {"function": function, "arguments": arguments}}))
    with pytest.raises(RunConfigError) as caught:
        config.check_functions()
    assert caught.value.faults == (fault,)


@pytest.mark.parametrize(
    ("text", "settings", "fault"),
    [
        ("[run\n", [], "{path} is no TOML: Expected ']' at the end of a table declaration"),
        ("", ["steps"], "--set steps: must be KEY=VALUE, as in --set optimizer.learning_rate=1e-3"),
    ],
)
def test_a_file_or_a_flag_that_cannot_be_read(text, settings, fault, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(RunConfigError) as caught:
        Config.from_files([path], settings)
    assert caught.value.faults[0].startswith(fault.format(path=path))


@pytest.mark.parametrize(
    ("optimizer", "fault"),
    [
        (
            {"name": "adamw", "arguments": {"b1": 0.9, "weight_decay": "x"}},
            ".weight_decay='x': adamw",
        ),
        ({"name": "sgd", "arguments": {"momentum": [0.9]}}, ".momentum=[0.9]: sgd"),
        ({"name": "lion", "arguments": {"mu_dtype": "bf16"}}, ".mu_dtype='bf16': lion"),
        ({"name": "lars", "arguments": {"eps": "a", "momentum": "b"}}, "={'eps': 'a', 'momentum'"),
        ({"name": "sgd", "arguments": {"nesterov": "no"}}, ".nesterov='no': must be true or false"),
        ({"name": "lbfgs"}, "={}: lbfgs fails with it: TypeError: "),
    ],
)
def test_arguments_with_which_an_optimizer_fails(optimizer, fault):
    """Issue 52: a traceback of JAX, after the run's folder was made."""
    table = LEAST | {"optimizer": {"learning_rate": 0.1} | optimizer}
    with pytest.raises(RunConfigError) as caught:
        Config.from_dict(table)
    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(f"optimizer.arguments{fault}")


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"init_value": "x", "decay_steps": 10}, "={'init_value': 'x', 'decay_steps': 10}: cosine"),
        ({"init_value": 1.0, "decay_steps": 10, "alpha": "x"}, ".alpha='x': cosine_decay_schedule"),
    ],
)
def test_arguments_with_which_a_schedule_fails(arguments, fault):
    schedule = {"name": "cosine_decay_schedule", "arguments": arguments}
    with pytest.raises(RunConfigError) as caught:
        Config.from_dict(LEAST | {"optimizer": {"schedule": schedule}})
    assert caught.value.faults[0].startswith(f"optimizer.schedule.arguments{fault}")


@pytest.mark.parametrize("command", ["train", "eval"])
@pytest.mark.parametrize("job", [("SHARDPIPE_PROCESSES", "2"), ("SLURM_STEP_NUM_TASKS", "4")])
def test_a_run_is_one_process(job, command, tmp_path, monkeypatch, capsys):
    """Issue 52: under `launch` each process trained alone, into one folder."""
    monkeypatch.setenv(*job)
    if job[1] == "2":
        monkeypatch.setenv("SHARDPIPE_PROCESS", "1")
        monkeypatch.setenv("SHARDPIPE_COORDINATOR", "127.0.0.1:1234")
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--config", str(tmp_path / "run.toml")])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"python -m pipeline {command}: " in said
    assert "SHARDPIPE_PROCESSES=1" in said
    assert job[1] != "2" or "this is one of 2 processes of a job, and" in said


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
def test_a_pipe_is_not_waited_for(kind, tmp_path):
    """Issue 52: the command waited for ever."""
    path = tmp_path / "run.toml"
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(RunConfigError) as caught:
        Config.from_files([path])
    assert caught.value.faults == (f"{path} cannot be read: Is a pipe or a device, no file",)


@pytest.mark.slow
def test_the_command_says_it_in_words_and_starts_no_device(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nfunction = "a:b"\n[run]\nsteps = 1.5\n')
    code = (
        "import sys, jax, pipeline.cli.main\n"
        "jax.devices = jax.local_devices = None\n"
        "sys.exit(pipeline.cli.main.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--config", path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "python -m pipeline train: the configuration has 2 faults\n- run.steps=1.5: must be a "
        "whole number\n- [data] is missing\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["train"],
            "python -m pipeline train: the following arguments are required: --config\n",
        ),
        (
            ["eval", "--config", "no.toml"],
            "python -m pipeline eval: the configuration has 1 fault\n- no.toml is missing\n",
        ),
        (
            ["train", "--config", "a", "--resum"],
            "python -m pipeline train: --resum is not an option; --help lists them\n",
        ),
    ],
)
def test_what_the_command_does_not_take(arguments, text, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err == text
