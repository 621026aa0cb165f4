"""The command line: `python -m jaxinfer.run`. Arguments in, one call out.

Exit codes: 0 done, 1 the run failed, 2 the arguments are wrong (one line says what and what would do), 130 interrupted.
"""

import functools
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from jaxinfer.errors import UserError

if TYPE_CHECKING:
    from experiments.ablation import Ablation
    from jaxinfer.checkpoints.watch import Watch
    from jaxinfer.evaluation.table import Table

# jax is imported inside the commands: the number of CPU devices must be set before, and --help needs none of it.

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="JAX inference of mixture-of-experts language models: FP8 KV pages, INT4 weights, tags on every page. "
    "Without a command it runs the quick ablation on the model that ships with it.",
)
console = Console()
errors = Console(stderr=True)


def writable(out: Path | None) -> Path | None:
    """Check a results folder before any work is done for it."""
    from jaxinfer.evaluation.table import check_writable

    return out and check_writable(out)



ModelOption = Annotated[str, typer.Option("--model", help="tiny, smollm2, a checkpoint folder, or a GGUF file")]
DevicesOption = Annotated[int, typer.Option("--devices", min=1, help="devices to shard over; on the CPU they are made")]
WEIGHTS = "bf16, fp8_e4m3, int4:g32, int4:g64, int4:g128 (int4 also with +dense)"
WeightsOption = Annotated[
    str | None, typer.Option("--weights", help=f"{WEIGHTS}; default bf16, with --separate int4:g32")
]
KVOption = Annotated[
    str | None, typer.Option("--kv", help="KV pages: bf16, fp8_e4m3; default bf16, with --separate fp8_e4m3")
]
SeparateOption = Annotated[bool, typer.Option("--separate", help="prefill and decode as two workers")]
PrefillWeightsOption = Annotated[str, typer.Option("--prefill-weights", help="of prefill, with --separate")]
PrefillKVOption = Annotated[str, typer.Option("--prefill-kv", help="of prefill, with --separate")]
IntegrityOption = Annotated[
    str, typer.Option("--integrity", help="what is checked of pages before each read: off, tags, digest")
]
MismatchOption = Annotated[
    str, typer.Option("--on-mismatch", help="of a request whose pages fail the check: abort, or recompute once")
]
PrefixOption = Annotated[
    bool, typer.Option("--prefix-cache/--no-prefix-cache", help="keep pages of prompts for others that begin alike")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="folder for JSON, Markdown and pictures", callback=writable)
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="of sampling and of the choice of examples")]

KVScalesOption = Annotated[
    Path | None, typer.Option("--kv-scales", help="scales of FP8 pages; default: beside the model, published, or 1")
]

GENERATE_EXAMPLES = """
Answers prompts with the engine.

    python -m jaxinfer.run generate --prompt "Tom has 3 owls and buys 4 more. How many owls does Tom have?"

    python -m jaxinfer.run generate --prompt "..." --prompt "..." --weights int4:g32 --kv fp8_e4m3 --devices 8

    cat prompts.txt | python -m jaxinfer.run generate --prompt - --temperature 0.8 --seed 7

    python -m jaxinfer.run generate --prompt "..." --separate --prefill-weights fp8_e4m3 --weights int4:g32
"""
ABLATION_EXAMPLES = """
Measures tables: quality with paired 95% intervals, capacity, speed as ratios.

    python -m jaxinfer.run ablation

    python -m jaxinfer.run ablation --tables kv-cache,weights,integrity --full --out results

    python -m jaxinfer.run ablation --tables capacity-kimi,capacity-glm

    python -m jaxinfer.run ablation --tables prefix-cache
"""
PLAN_EXAMPLES = """
Weights, memory, tokens that fit and time floors of a model on GPUs that need not be there.

    python -m jaxinfer.run plan --model kimi-k2.6 --devices 8 --gpu h200

    python -m jaxinfer.run plan --model kimi-k2.6 --devices 8 --gpu h200 --compile --out results
"""
BENCH_EXAMPLES = """
Drives an engine with requests and reports throughput, latencies, KV use over time, preemptions and refusals.

    python -m jaxinfer.run bench --concurrency 16 --lengths fixed --input 64 --output 32

    python -m jaxinfer.run bench --concurrency 64 --kv fp8_e4m3 --kv-budget-mib 3.375 --out results

    python -m jaxinfer.run bench --rate 20 --requests 200 --lengths sharegpt --max-queue 32

    python -m jaxinfer.run bench --concurrency 16 --layout local-pair
"""
FAULTS_EXAMPLES = """
Breaks a running engine on purpose, in every way it knows, and counts what is noticed, missed and leaked.

    python -m jaxinfer.run faults --quick

    python -m jaxinfer.run faults --injections 1000 --level tags,digest --out results

A run that is stopped goes on where it was when it is given the same --out and --seed.
"""
CONVERT_EXAMPLES = """
Writes a checkpoint anew with its weights in FP8 blocks or INT4, rounded to nearest, in layouts that other engines read.
Killed on the way, the same command goes on from where it was.

    python -m jaxinfer.run convert --model GLM-4.6 --to int4:g32 --out GLM-4.6-int4
"""
CALIBRATE_EXAMPLES = """
Finds the scales of FP8 KV pages: runs texts through the model and writes, for each layer and kind of entry, the scale
that leaves a factor of 2 above the largest. The file goes into the model's folder, where it is found from then on.

    python -m jaxinfer.run calibrate --model GLM-4.6 --texts sample.txt

    python -m jaxinfer.run calibrate --model smollm2 --texts sample.txt --out scales.json

    python -m jaxinfer.run generate --model smollm2 --kv fp8_e4m3 --kv-scales scales.json --prompt "..."
"""
WORKER_EXAMPLES = """
Runs one worker of a deployment: prefill or decode, as the layout says (see jaxinfer/distributed/layout.py).

    python -m jaxinfer.run worker --role prefill --layout pair.toml

    python -m jaxinfer.run worker --role decode --layout pair.toml --index 1

A worker of several processes, on this host or on others, needs each of them started:

    python -m jaxinfer.run worker --role decode --layout pair.toml --process 1
"""
TABLES = {
    "kv-cache": "kv_cache",
    "weights": "weights",
    "integrity": "integrity",
    "concurrency": "concurrency",
    "disaggregation": "disaggregation",
    "weights-concurrency": "phases",
    "prefix-cache": "prefix_cache",
    "capacity-kimi": "capacity",
    "capacity-glm": "capacity",
}


@app.callback(invoke_without_command=True)
def main_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        ablation()


@app.command(help=GENERATE_EXAMPLES)
def generate(
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="a user's message, repeatable; - reads lines")],
    model: ModelOption = "tiny",
    weights: WeightsOption = None,
    kv: KVOption = None,
    kv_scales: KVScalesOption = None,
    separate: SeparateOption = False,
    prefill_weights: PrefillWeightsOption = "fp8_e4m3",
    prefill_kv: PrefillKVOption = "bf16",
    integrity: IntegrityOption = "tags",
    on_mismatch: MismatchOption = "abort",
    prefix_cache: PrefixOption = True,
    devices: DevicesOption = 1,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="the most tokens of an answer")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0: all")] = 0,
    min_p: Annotated[float, typer.Option("--min-p")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="text that ends an answer; may be repeated")] = None,
    kernels: Annotated[str, typer.Option("--kernels", help="auto, reference, triton, interpret")] = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="prompts as they are, with special tokens, no chat turn")] = False,
    seed: SeedOption = 0,
) -> None:
    prepare(devices * (1 + separate))
    from jaxinfer.checkpoints.model import Model
    from jaxinfer.engine import LLM, SamplingParams

    params = SamplingParams(max_tokens, temperature, top_p, top_k, min_p, seed, tuple(stop or ()))
    formats = precisions(weights, kv, separate, prefill_weights, prefill_kv)  # before the model, which may take long
    with progress_display() as progress:
        loaded = Model.load(model, devices, loading_bar(progress, f"loading {model}"), kv_scales)
    options: dict[str, Any] = {"integrity": integrity, "on_mismatch": on_mismatch, "prefix_cache": prefix_cache}
    prompts = [line for p in prompt for line in (sys.stdin.read().splitlines() if p == "-" else [p])]
    tokens = [loaded.encode(p) if raw else loaded.chat(p) for p in prompts]
    if not tokens:
        raise UserError("no prompt was given on standard input; give at least one line")
    llm = LLM(loaded, **formats, devices=devices, kernels=kernels, **options)
    for each in tokens:
        llm.engine.check(each, params)
    each_on = f"{devices} device{'s' * (devices > 1)}{' each' * separate}"
    runs_at = f"{llm.precision}, {each_on}, integrity {integrity}"
    errors.print(f"{model}: {runs_at}", style="dim", highlight=False)
    if len(tokens) == 1:
        for text in llm.stream(tokens[0], params):
            print(text, end="", flush=True)
        print()
        return
    for text, completion in zip(prompts, llm.generate(tokens, params), strict=True):
        console.print(text, style="bold", markup=False, highlight=False)
        print(completion.text)
        if completion.error:
            errors.print(completion.error, style="red", markup=False, highlight=False)


@app.command(help=ABLATION_EXAMPLES)
def ablation(
    tables: Annotated[str, typer.Option("--tables", help="names with commas between")] = "kv-cache,weights,integrity",
    model: ModelOption = "tiny",
    devices: DevicesOption = 1,
    out: OutOption = None,
    full: Annotated[bool, typer.Option("--full", help="many more examples and rounds; about half an hour")] = False,
    budget: Annotated[int, typer.Option("--budget-mib", min=1, help="KV memory that capacities are given for")] = 16,
    seed: SeedOption = 0,
) -> None:
    makers = table_makers(tables)
    prepare(devices * (1 + ("disaggregation" in tables)))
    from jaxinfer.checkpoints.model import Model
    command = shlex.join(["python", "-m", "jaxinfer.run", *sys.argv[1:]])
    from experiments.ablation import FULL, QUICK, Ablation

    with progress_display() as progress:
        run = Ablation(
            Model.load(model), command, FULL if full else QUICK, seed, devices, budget << 20, progress
        )
        show((make(run) for make in makers), out)


@app.command(help=PLAN_EXAMPLES)
def plan(
    model: Annotated[str, typer.Option("--model", help="a preset, or a config.json or its folder")] = "kimi-k2.6",
    devices: Annotated[int, typer.Option("--devices", min=1, help="GPUs of each phase")] = 8,
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, b200, a100")] = "h200",
    prefill_weights: Annotated[str, typer.Option("--prefill-weights")] = "fp8_e4m3",
    prefill_kv: Annotated[str, typer.Option("--prefill-kv")] = "bf16",
    decode_weights: Annotated[str, typer.Option("--decode-weights")] = "int4:g32",
    decode_kv: Annotated[str, typer.Option("--decode-kv")] = "fp8_e4m3",
    context: Annotated[int, typer.Option("--context", help="tokens of a request")] = 21_440,
    compile: Annotated[bool, typer.Option("--compile", help="compile the real steps too; needs the aot extra")] = False,
    out: OutOption = None,
) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # nothing runs on a GPU here, and the compiler must not look for one
    from jaxinfer.planning import report

    formats = (prefill_weights, prefill_kv, decode_weights, decode_kv)
    with progress_display() as progress:
        progress.add_task("planning" + " and compiling" * compile, total=None)
        tables = report.plan(model, devices, gpu, *formats, context, compile)
    show(tables, out)


@app.command(help=BENCH_EXAMPLES)
def bench(
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="callers with a request each; 8")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="or: requests a second, Poisson arrivals")] = None,
    requests: Annotated[int | None, typer.Option("--requests", help="in all; 4 for each caller, or 64")] = None,
    lengths: Annotated[str, typer.Option("--lengths", help="fixed, random, sharegpt, agent")] = "fixed",
    input: Annotated[int | None, typer.Option("--input", help="tokens of a prompt; agent: of the prefix")] = None,
    output: Annotated[int | None, typer.Option("--output", help="tokens of an answer")] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="workers of a TOML file, or local-pair: two that are started here")
    ] = None,
    model: ModelOption = "tiny",
    weights: WeightsOption = None,
    kv: KVOption = None,
    separate: SeparateOption = False,
    prefill_weights: PrefillWeightsOption = "fp8_e4m3",
    prefill_kv: PrefillKVOption = "bf16",
    integrity: IntegrityOption = "tags",
    prefix_cache: PrefixOption = True,
    devices: DevicesOption = 1,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="requests decoded at once")] = None,
    num_pages: Annotated[int | None, typer.Option("--num-pages", min=1, help="KV pages of 16 tokens")] = None,
    budget: Annotated[float | None, typer.Option("--kv-budget-mib", help="or: memory for KV pages, in MiB")] = None,
    max_queue: Annotated[int, typer.Option("--max-queue", min=1, help="requests that may wait; more: refused")] = 4096,
    out: OutOption = None,
    seed: SeedOption = 0,
) -> None:
    prepare(devices * (1 + separate))
    from jaxinfer.evaluation.load.bench import Load, bench, bench_table
    from jaxinfer.evaluation.load.deployment import engine_of, layout_of
    from jaxinfer.evaluation.load.lengths import Mix
    from jaxinfer.evaluation.table import run_meta

    callers = 8 if concurrency is None and rate is None else concurrency
    count = requests if requests is not None else 4 * callers if callers else 64
    load = Load(Mix.of(lengths, input, output), count, callers, rate, seed)
    formats = precisions(weights, kv, separate, prefill_weights, prefill_kv)
    pool = {"slots": slots, "num_pages": num_pages, "budget_mib": budget}
    given = [name for name, value in {**pool, "weights": weights, "kv": kv}.items() if value]
    if layout is not None and given:
        raise UserError(f"{given[0]} of the workers is the layout's to say; leave it out, or leave out --layout")
    options = {"integrity": integrity, "devices": devices, "max_queue": max_queue, "prefix_cache": prefix_cache}
    with progress_display() as progress:
        progress.add_task("starting the workers" if layout else "starting the engine", total=None)
        opened = layout_of(layout, load) if layout else engine_of(model, load, formats, pool, options)
        with opened as (engine, jobs, config, about):
            runs_at = f"{engine.precision}, integrity {config.integrity}"
            errors.print(f"{about['model']}: {runs_at}, {load}", style="dim", highlight=False)
            bar = progress.add_task("serving", total=count)
            result = bench(engine, jobs, load, functools.partial(progress.advance, bar))
    command = shlex.join(["python", "-m", "jaxinfer.run", *sys.argv[1:]])
    show([bench_table(result, load, config, run_meta(command, seed, count, engine.precision, **about))], out)


@app.command(help=FAULTS_EXAMPLES)
def faults(
    quick: Annotated[bool, typer.Option("--quick", help="few injections; about two minutes on two cores")] = False,
    injections: Annotated[
        int | None, typer.Option("--injections", min=1, help="of each fault at each level, 1000 by default")
    ] = None,
    level: Annotated[str, typer.Option("--level", help="names with commas between")] = "off,tags,digest,digest-all",
    out: OutOption = None,
    seed: SeedOption = 0,
) -> None:
    prepare(1)
    from experiments import faults as campaign

    each, operations = campaign.QUICK if quick else campaign.FULL
    levels = list(dict.fromkeys(name.strip() for name in level.split(",") if name.strip()))
    command = shlex.join(["python", "-m", "jaxinfer.run", *sys.argv[1:]])
    with progress_display() as progress:
        bar = progress.add_task("injecting faults", total=(injections or each) * len(campaign.FAULTS) * len(levels))
        notes = out / "faults-progress.jsonl" if out else None
        advance = functools.partial(progress.advance, bar)
        table = campaign.faults(levels, injections or each, operations, seed, command, notes, advance)
    show([table], out)
    if broken := campaign.broken_claims(table):
        errors.print(f"a claim did not hold: {', '.join(broken)}")
        raise typer.Exit(1)


@app.command(help=CONVERT_EXAMPLES)
def convert(
    model: Annotated[Path, typer.Option("--model", help="a Hugging Face folder")],
    to: Annotated[str, typer.Option("--to", help="fp8_e4m3, int4:g32, int4:g64, int4:g128 (int4 also with +dense)")],
    out: Annotated[Path, typer.Option("--out", help="the folder that is made; its place must have the room")],
) -> None:
    prepare(1)
    from jaxinfer.checkpoints.convert import convert
    from jaxinfer.quantization.formats import WeightFormat

    format = WeightFormat.parse(to)
    with progress_display() as progress:
        report = convert(model, out, format, loading_bar(progress, f"converting to {format}"))
    ratio = report.bytes_after / report.bytes_before
    print(f"{out}: {report.bytes_before:,} bytes before, {report.bytes_after:,} after ({ratio:.3f})")
    for error in sorted(report.errors, key=lambda e: -e.relative_rms)[:10]:
        print(f"{error.name}: error {error.relative_rms:.4f} of its size (root mean square), at most {error.max:.4g}")
    if len(report.errors) > 10:
        print(f"and {len(report.errors) - 10} tensors with smaller errors, all in {out / 'conversion.json'}")


@app.command(help=CALIBRATE_EXAMPLES)
def calibrate(
    texts: Annotated[Path, typer.Option("--texts", help="plain text like that to be served")],
    model: ModelOption = "tiny",
    out: Annotated[Path | None, typer.Option("--out", help="the file that is made; default: beside the model")] = None,
    windows: Annotated[int, typer.Option("--windows", min=1, help="pieces of the text that are run")] = 32,
    length: Annotated[int, typer.Option("--length", min=2, help="tokens of a piece")] = 512,
) -> None:
    prepare(1)
    from jaxinfer.checkpoints import calibration, kv_scales
    from jaxinfer.checkpoints.model import EMBEDDED, Model

    if out is None and model in EMBEDDED:
        raise UserError(f"{model} ships with its scales; give --out to keep others elsewhere")
    path = out or kv_scales.place(Model.where(model))
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"can't write to {path}; give --out a file in a folder that can be written to")
    text = calibration.read_text(texts)
    with progress_display() as progress:
        loaded = Model.load(model, 1, loading_bar(progress, f"loading {model}"))
        if length > loaded.config.max_position:
            raise UserError(f"length {length} exceeds the model's {loaded.config.max_position} positions")
        pieces = calibration.windows(loaded.tokenizer.encode(text), loaded.tokenizer.bos_id, length, windows)
        bar = progress.add_task("calibrating", total=len(pieces))
        scales = calibration.calibrate(
            loaded.config, loaded.params, pieces, functools.partial(progress.advance, bar)
        )
    about = {"margin": calibration.MARGIN, "texts": texts.name, "tokens": sum(map(len, pieces))}
    kv_scales.save(path, scales, {"model": loaded.config.name, **about})
    for kind, values in scales.items():
        largest = [float(value) * calibration.LIMIT for value in values]
        most = max(largest)
        print(f"{kind}: largest entry {most:.4g} (layer {largest.index(most)}), smallest {min(largest):.4g}")
    print(f"wrote {path}: one scale for each layer and kind, from {about['tokens']:,} tokens")


@app.command(help=WORKER_EXAMPLES)
def worker(
    role: Annotated[str, typer.Option("--role", help="prefill or decode")],
    layout: Annotated[Path, typer.Option("--layout", help="the TOML file of the whole deployment")],
    index: Annotated[int, typer.Option("--index", min=0, help="which of the workers of that role this is")] = 0,
    process: Annotated[int, typer.Option("--process", min=0, help="which of the processes of that worker")] = 0,
) -> None:
    from jaxinfer.distributed.layout import ROLES, Layout

    if role not in ROLES:
        raise UserError(f"role must be {' or '.join(ROLES)}, not {role!r}")
    plan = Layout.read(layout)
    if index >= len(specs := plan.of_role(role)):
        raise UserError(f"index {index}: the layout has {len(specs)} {role} worker{'s' * (len(specs) > 1)}")
    spec = specs[index]
    if process >= spec.processes:
        raise UserError(f"process {process}: the {spec} has processes = {spec.processes}")
    prepare(spec.devices // spec.processes)
    from jaxinfer.distributed.spanning import Follower
    from jaxinfer.distributed.worker import Worker
    from jaxinfer.parallel.peer import PeerGone

    try:
        serving = Follower(plan, spec, process) if process else Worker(plan, spec)
        name = f"{spec}, process {process}" if spec.processes > 1 else f"{spec}"
        what = f"{serving.engine.precision}, integrity {plan.integrity}"
        errors.print(f"{name}: {what}; ready", highlight=False, soft_wrap=True)
        serving.serve()
    except PeerGone as gone:
        errors.print(f"error: {spec}, process {process}: {gone}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def precisions(
    weights: str | None, kv: str | None, separate: bool, prefill_weights: str, prefill_kv: str
) -> dict[str, Any]:
    """The formats of an engine as arguments of `LLM`, checked. With `separate` decode has the published ones where none
    are given."""
    from jaxinfer.config import PhasePrecision, Precision

    default = PhasePrecision().decode if separate else Precision()
    decode = Precision.parse(weights or str(default.weights), kv or str(default.kv))
    phases = PhasePrecision(Precision.parse(prefill_weights, prefill_kv), decode) if separate else None
    return {"weight_format": str(decode.weights), "kv_format": str(decode.kv), "phases": phases}


def loading_bar(progress: Progress, what: str) -> "Watch":
    """A bar of `progress` for work on a checkpoint."""
    from jaxinfer.checkpoints.watch import Watch

    bar = progress.add_task(what, total=None)

    class Bar(Watch):
        def total(self, steps: int) -> None:
            progress.update(bar, total=steps)

        def advance(self) -> None:
            progress.advance(bar)

        def note(self, text: str) -> None:
            progress.console.print(f"note: {text}", style="dim", highlight=False)

    return Bar()


def show(tables: "Iterable[Table]", out: Path | None) -> None:
    """Print tables as they come, and write each to `out`."""
    from jaxinfer.evaluation.table import to_rich, write

    for table in tables:
        console.print(to_rich(table))
        if out is not None:
            console.print(f"wrote {', '.join(map(str, write(table, out).values()))}", highlight=False)


def table_makers(names: str) -> "list[Callable[[Ablation], Table]]":
    """The function of each table in `names`. UserError on one that there isn't."""
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in wanted:
        if name not in TABLES:
            raise UserError(f"unknown table {name!r}; there are: {', '.join(TABLES)}")
    if not wanted:
        raise UserError(f"no table was named; there are: {', '.join(TABLES)}")

    def make(name: str, run: "Ablation") -> "Table":
        module = importlib.import_module(f"experiments.{TABLES[name]}")
        return getattr(module, name.replace("-", "_"))(run)

    return [functools.partial(make, name) for name in wanted]


def prepare(devices: int) -> None:
    """Set what jax reads when it starts: so many devices on the CPU, and compiled programs kept between runs."""
    flag = "--xla_force_host_platform_device_count"
    if devices > 1 and flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={devices}".strip()
    from jaxinfer.parallel.compilation import use_compilation_cache

    use_compilation_cache()


def progress_display() -> Progress:
    """Bars on standard error, gone when they are done; nothing at all where nobody looks."""
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def main() -> None:
    """Run the command line; every mistake of the user's is one line."""
    try:
        sys.exit(app(standalone_mode=False) or 0)  # what typer.Exit was given
    except UserError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        errors.print("interrupted")
        sys.exit(130)
    except typer.BadParameter.__bases__[0].__bases__[0] as error:  # type: ignore[misc]
        fail(f"{error.format_message()} (see --help)")  # all that typer itself finds wrong with the arguments


def fail(message: str) -> None:
    """Say what is wrong in one line, and end with 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
