"""The `tunesmith` command. Each verb imports its dependencies when it runs, so that `--help` is fast."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli_errors import check_broke, mistakes_of, refused, system_error
from app.cli_export import export, push
from app.cli_runs import RAW, RUNS, Json, Raw, RunName, RunsDir, runs_app
from app.cli_sweep import sweep_line
from app.typer_style import Interrupted, Verbs

app = Verbs(
    name="tunesmith", help="Fine-tune a language model; the strategy changes speed and memory, never the model."
)
app.add_typer(runs_app, name="runs")


def _show_version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"tunesmith {version('tunesmith')}")
        raise typer.Exit


@app.callback()
def _shared(
    version: Annotated[
        bool, typer.Option("--version", metavar="", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    preset: Annotated[str, typer.Argument(metavar="[PRESET]", help="A preset of that model.")] = "tiny-lora",
    gpus: Annotated[
        str | None, typer.Option(metavar="<ids>", help="GPU ids such as 0,2; default: those that divide the batch.")
    ] = None,
    num_processes: Annotated[
        str | None, typer.Option("--num_processes", metavar="<int>", help="Processes; needed only without GPUs.")
    ] = None,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Fine-tune the small model that ships with Tunesmith, and show what it learned."""
    from app.commands.demo import run_demo

    return run_demo(preset, gpus, num_processes, runs_dir, json)


@app.command(context_settings=RAW)
def train(args: Raw = None) -> int:
    """Fine-tune a model: a preset, a config file, options, or all three."""
    from app.commands.runs import train_verb

    return train_verb(args or [])


@app.command(context_settings=RAW)
def resume(args: Raw = None) -> int:
    """Resume a stopped or failed run from its newest good checkpoint."""
    from app.commands.runs import resume_verb

    return resume_verb(args or [])


@app.command(context_settings=RAW)
def prove(args: Raw = None) -> int:
    """Train your model on your data under each strategy and compare every step with a single process."""
    from app.prove.command import prove_verb

    return prove_verb(args or [])


@app.command(context_settings=RAW)
def bench(args: Raw = None) -> int:
    """Measure which settings train your model fastest on this machine."""
    from app.bench.bench import bench_verb

    return bench_verb(args or [])


@app.command("eval", context_settings=RAW)
def evaluate(args: Raw = None) -> int:
    """Compare models on the same rows: losses, answers and metrics, with a paired test."""
    from app.eval.command import eval_verb

    return eval_verb(args or [])


@app.command(context_settings=RAW)
def merge(args: Raw = None) -> int:
    """Merge runs of one base into one model, or average a run's checkpoints."""
    from app.merge.command import merge_verb

    return merge_verb(args or [])


@app.command(context_settings=RAW)
def sweep(args: Raw = None) -> int:
    """Train with several values of some options in the queue of this machine, and compare the results."""
    return int(sweep_line(args or []) or 0)


@app.command(context_settings=RAW)
def plan(args: Raw = None) -> int:
    """Estimate which strategies fit your model on these (or other) GPUs, and rank them by speed."""
    from app.plan.command import plan_verb

    return plan_verb(args or [])


@app.command()
def doctor(
    strategy: Annotated[
        str | None,
        typer.Option(metavar="<name|file>", help="Strategy whose groups of ranks are tested; default: single or ddp."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="<ids>", help="GPU ids such as 0,2; default: the free ones.")
    ] = None,
    num_processes: Annotated[
        str | None,
        typer.Option("--num_processes", metavar="<int>", help="Processes on all machines; needed only without GPUs."),
    ] = None,
    tp_size: Annotated[
        str | None, typer.Option("--tp_size", metavar="<int>", help="Mesh sizes as of `train`: tensor parallelism.")
    ] = None,
    cp_size: Annotated[str | None, typer.Option("--cp_size", metavar="<int>", help="Context parallelism.")] = None,
    sp_size: Annotated[str | None, typer.Option("--sp_size", metavar="<int>", help="Sequence parallelism.")] = None,
    ep_size: Annotated[str | None, typer.Option("--ep_size", metavar="<int>", help="Expert parallelism.")] = None,
    dp_replicate_size: Annotated[
        str | None, typer.Option("--dp_replicate_size", metavar="<int>", help="Replicas of a sharded model.")
    ] = None,
    pp_size: Annotated[str | None, typer.Option("--pp_size", metavar="<int>", help="Pipeline stages.")] = None,
    num_machines: Annotated[
        str | None,
        typer.Option("--num_machines", metavar="<int>", help="Number of machines; run the same command on each."),
    ] = None,
    machine_rank: Annotated[
        str | None, typer.Option("--machine_rank", metavar="<int>", help="Rank of this machine, from 0.")
    ] = None,
    main_process_ip: Annotated[
        str | None, typer.Option("--main_process_ip", metavar="<host>", help="Address of machine 0.")
    ] = None,
    main_process_port: Annotated[
        str | None, typer.Option("--main_process_port", metavar="<int>", help="Port on machine 0 for the rendezvous.")
    ] = None,
    timeout: Annotated[
        str, typer.Option(metavar="<seconds>", help="How long machines may take to join, and ranks for each step.")
    ] = "120",
    quick: Annotated[
        bool,
        typer.Option("--quick", metavar="", help="Check values only; measure no disk, bandwidth, slow rank or link."),
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Check this machine, or several together, before a run: versions, GPUs, disk, network, every collective."""
    from app.doctor.command import doctor_verb

    launch = {"strategy": strategy, "gpus": gpus, "num_processes": num_processes, "num_machines": num_machines}
    launch |= {"machine_rank": machine_rank, "main_process_ip": main_process_ip, "main_process_port": main_process_port}
    launch |= {"tp_size": tp_size, "cp_size": cp_size, "sp_size": sp_size, "dp_replicate_size": dp_replicate_size}
    launch |= {"ep_size": ep_size, "pp_size": pp_size}
    chosen = {name: value for name, value in launch.items() if value is not None}
    return doctor_verb(chosen, runs_dir, timeout, quick, json)


@app.command(context_settings=RAW)
def data(args: Raw = None) -> int:
    """Preview the training data: rows with their trained tokens marked, lengths, packing, bad rows."""
    from app.commands.data import data_verb

    return data_verb(args or [])


@app.command(context_settings=RAW)
def record(args: Raw = None) -> int:
    """Record what a teacher predicts, so that distillation learns from it without loading the teacher."""
    from app.commands.record import record_verb

    return record_verb(args or [])


@app.command()
def stop(
    run: RunName,
    timeout: Annotated[str, typer.Option(metavar="<seconds>", help="How long to wait for the run to end.")] = "300",
    no_save: Annotated[bool, typer.Option("--no_save", metavar="", help="Stop without saving a checkpoint.")] = False,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Kill remaining processes after the timeout.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Save a checkpoint and stop a run, and wait until it has ended; a queued run is cancelled."""
    from app.commands.runs import stop_verb

    return stop_verb(run, timeout, not no_save, force, runs_dir, json)


app.command()(export)
app.command()(push)


@app.command()
def chat(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run id, or a base model: embedded, a Hub id or a folder.")],
    checkpoint: Annotated[
        str | None, typer.Option(metavar="<name>", help="Checkpoint, such as step-00000120; default: the run's export.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", metavar="", help="Also show the base model's answer.")] = False,
    prompt: Annotated[str | None, typer.Option(metavar="<text>", help="Answer this prompt and exit.")] = None,
    system: Annotated[str, typer.Option(metavar="<text>", help="System prompt.")] = "",
    plain: Annotated[
        bool, typer.Option("--plain", metavar="", help="Complete plain text without the chat template.")
    ] = False,
    temperature: Annotated[
        str | None, typer.Option(metavar="<float>", help="Sampling temperature; 0: greedy decoding.")
    ] = None,
    top_p: Annotated[
        str | None, typer.Option("--top_p", metavar="<float>", help="Nucleus sampling: cumulative probability to keep.")
    ] = None,
    top_k: Annotated[
        str | None,
        typer.Option("--top_k", metavar="<int>", help="Number of most likely tokens to sample from; 0: all."),
    ] = None,
    max_new_tokens: Annotated[
        str | None, typer.Option("--max_new_tokens", metavar="<int>", help="Maximum length of an answer.")
    ] = None,
    repetition_penalty: Annotated[
        str | None,
        typer.Option("--repetition_penalty", metavar="<float>", help="Penalty for repeated tokens; 1: none."),
    ] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="<int>", help="Sampling seed; the same seed gives the same answer.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="<auto|cpu|id>", help="GPU id or cpu; auto: a free GPU.")] = "auto",
    revision: Annotated[
        str | None, typer.Option(metavar="<name>", help="Branch, tag or commit of a base model on the Hub.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust_remote_code", metavar="", help="Allow custom model code from the model's repository."),
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Chat with a run's model, its base model, or both; Ctrl-C stops an answer, Ctrl-D exits."""
    from app.commands.chat import chat_verb

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "max_new_tokens": max_new_tokens}
    sampling |= {"repetition_penalty": repetition_penalty, "seed": seed}
    where: dict[str, Any] = {"device": device, "revision": revision, "remote_code": trust_remote_code}
    return chat_verb(run, runs_dir, checkpoint, base, prompt, system, plain, sampling=sampling, as_json=json, **where)


@app.command()
def serve(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run, RUN@WEIGHTS (a checkpoint or an export), model folder, or Hub id."),
    ],
    port: Annotated[
        str | None, typer.Option(metavar="<int>", help="Port; 0: any free one; default: 8000 or the next free one.")
    ] = None,
    host: Annotated[
        str,
        typer.Option(metavar="<address>", help="Address to listen on; others than this machine's need a token."),
    ] = "127.0.0.1",
    engine: Annotated[
        str, typer.Option(metavar="<transformers|vllm>", help="What generates; vllm where it is installed.")
    ] = "transformers",
    max_concurrent: Annotated[
        str | None, typer.Option("--max_concurrent", metavar="<int>", help="Answers at a time; default: 4.")
    ] = None,
    max_waiting: Annotated[
        str | None,
        typer.Option("--max_waiting", metavar="<int>", help="Requests that may wait; default: 16."),
    ] = None,
    max_new_tokens: Annotated[
        str, typer.Option("--max_new_tokens", metavar="<int>", help="Most tokens of an answer.")
    ] = "2048",
    device: Annotated[str, typer.Option(metavar="<auto|cpu|id>", help="GPU id or cpu; auto: a free GPU.")] = "auto",
    revision: Annotated[
        str | None, typer.Option(metavar="<name>", help="Branch, tag or commit of a model on the Hub.")
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust_remote_code", metavar="", help="Allow custom model code from the model's repository."),
    ] = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Serve a run's model to programs that speak the OpenAI chat interface."""
    from app.commands.serve import Options, serve_verb

    options = Options(port, host, engine, max_concurrent, max_waiting, max_new_tokens, device, revision)
    return serve_verb(run, runs_dir, options, trust_remote_code)


@app.command()
def presets(json: Json = False) -> int:
    """List the available presets."""
    from app.commands.runs import presets_verb

    return presets_verb(json)


@app.command()
def strategies(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Strategy or Accelerate YAML to describe, or `import`.")
    ] = None,
    file: Annotated[str | None, typer.Argument(metavar="FILE", help="DeepSpeed JSON to import.")] = None,
    num_processes: Annotated[
        str | None, typer.Option("--num_processes", metavar="<int>", help="Processes of the imported strategy.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="<file>", help="Accelerate YAML to write; default: the JSON's name, in this folder."),
    ] = None,
    json: Json = False,
) -> int:
    """List the strategies, describe one (`strategies fsdp2`), or import a DeepSpeed JSON (`strategies import FILE`)."""
    from app.commands.strategies import strategies_verb

    return strategies_verb(name, file, num_processes, output, json)


@app.command()
def ui(
    port: Annotated[str | None, typer.Option(metavar="<int>", help="Port; default: 7860 or the next free one.")] = None,
    host: Annotated[
        str, typer.Option(metavar="<address>", help="Address to listen on; any other than 127.0.0.1 needs --auth.")
    ] = "127.0.0.1",
    auth: Annotated[
        str | None,
        typer.Option(
            metavar="<user>", help="Require a login with this user name; set the password in TUNESMITH_UI_PASSWORD."
        ),
    ] = None,
    allow: Annotated[
        list[Path] | None,
        typer.Option(metavar="<dir>", help="Allow reading models and data from this folder; repeatable."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust_remote_code", metavar="", help="Allow runs to enable trust_remote_code.")
    ] = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Start the web UI to launch, monitor, compare and try out runs."""
    from app.commands.ui import ui_verb

    return ui_verb(port, host, auth, runs_dir, allow or [], trust_remote_code)


def run_verb(arguments: Sequence[str]) -> int:
    """Runs a command line; reports the user's mistakes and system errors instead of raising them.

    Returns:
        The exit status: 0 success, 1 the run failed, 2 invalid request, 130 stopped or interrupted.
    """
    from app.console import report_json, say

    try:
        alone = list(arguments) in ([], ["runs"])  # without a verb, show the help
        return int(_invoke(app, [*arguments, "--help"] if alone else arguments) or 0)
    except (KeyboardInterrupt, Interrupted):
        say("interrupted")
        if "--json" in arguments:
            report_json({"run_dir": None, "state": "stopped", "cause": "interrupted"})
        return 130
    except BrokenPipeError:
        sys.stdout = None  # the reader is gone; keep Python from flushing to it at exit
        return 1
    except OSError as error:
        return system_error(error, "--json" in arguments)
    except Exception as error:
        if hasattr(error, "cause"):  # CheckBroke, not imported here for speed
            return check_broke(error, "--json" in arguments)
        mistakes = mistakes_of(error)
        if not mistakes:
            raise
        return refused(mistakes, "--json" in arguments)


def _invoke(verbs: Callable[..., Any], arguments: Sequence[str]) -> Any:
    return verbs(args=list(arguments), prog_name="tunesmith", standalone_mode=False)


def main() -> None:
    """Entry point of the installed command."""
    from app.console import prepare_streams

    prepare_streams()
    sys.exit(run_verb(sys.argv[1:]))


if __name__ == "__main__":
    main()
