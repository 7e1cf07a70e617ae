"""Published and predicted measurements of decoding and prefill, and the fit of the decode constants.

``python -m benchmarks.calibration.generation DIRECTORY [--fit]``
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from benchmarks.calibration.rows import Prediction, Row, device_of, read_models, read_rows
from benchmarks.systems.engines import DECODERS
from flexrlhf.config.axes import ParallelDims
from flexrlhf.guideline.costs.cost_model import Call, Links, Mesh, Transformer
from flexrlhf.guideline.costs.generation import generate_cost, prefill_cost, step_cost
from flexrlhf.guideline.costs.profiles import DecodeProfile
from flexrlhf.placement.devices import DeviceClass

ENGINES = (
    ("llm_benchmark/ vllm", "vllm-0.3"),
    ("vllm.* 0\\.[0-3]\\.", "vllm-0.3"),
    ("vllm.* 0\\.[45]\\.", "vllm-0.5"),
    ("vllm.* (0\\.[789]|0\\.\\d\\d|1)\\.", "vllm"),
    ("vllm", "vllm-0.6"),
    ("lmdeploy|turbomind", "lmdeploy"),
    ("tensorrt.* 0\\.|llm_benchmark/ tensorrt", "tensorrt-llm-0.6"),
    ("tensorrt|trt|nim", "tensorrt-llm"),
    ("gpt-fast", "gpt-fast"),
    ("deepspeed", "deepspeed"),
    ("hf|transformers", "transformers"),
)
"""Pattern in a row's group, system and version → engine; the first that matches."""
ALIASES = {"llama-70b": "llama-2-70b", "mistral-7b": "mistral-7b-v0.3"}
FP8_FAMILIES = ("H100", "H200", "H800", "H20", "L40S", "RTX4090", "B200")
FP8_GAIN = 1.55
"""Speed of fp8 matrix products relative to 16-bit ones, if peaks differ by a factor of 2. Fitted."""
FREE_SHARE, FIXED_GB = 0.9, 2.0
"""Fraction of a device's memory that engines use, and its part that is neither weights nor cache."""
LEAST_HBM_GB_S = 900
MOST_SEQUENCES = {"tensorrt-llm": 2048}
"""Default of the most rows that an engine decodes together; other engines: 256."""
STEADY_ROUNDS = 12
"""Batches of a saturated server that are simulated."""
UNSTATED = {"gpt-fast": (6.0, 200.0)}
"""Tokens of prompt and response of a benchmark whose rows do not repeat them (gpt-fast, generate.py)."""

FITTED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("transformers", "torch", "vllm-0.3"), ("launch_seconds",)),
    (("transformers", "torch", "deepspeed"), ("cache",)),
    (("vllm-0.6", "vllm-0.5", "vllm-0.3"), ("layer_seconds",)),
    (("vllm-0.6", "vllm-0.5", "vllm-0.3", "vllm"), ("cache", "step_seconds")),
    (("vllm", "vllm-0.6", "vllm-0.5", "tensorrt-llm", "tensorrt-llm-0.6", "gpt-fast"), ("one_shot_seconds",)),
    (("vllm-0.6", "vllm-0.3"), ("entry_seconds",)),
    (("vllm-0.5",), ("row_seconds", "entry_seconds")),
    (("lmdeploy",), ("layer_seconds", "cache", "row_seconds", "pass_launch_seconds")),
    (("tensorrt-llm-0.6",), ("layer_seconds", "cache", "reread")),
    (("tensorrt-llm",), ("layer_seconds", "cache", "row_seconds")),
    (("gpt-fast", "vllm"), ("layer_seconds",)),
)
"""Engines that share constants, and the constants."""
MOST_CACHE = 0.92
"""Highest fraction of the stated memory bandwidth that a kernel reaches."""
OTHERS = ("FP8_GAIN", "host factor of PCIe 4")
"""Other constants that are fitted."""


@dataclass(frozen=True)
class GenerationCase:
    """A row as a call on a mesh.

    row:       the row
    call:      the call
    mesh:      its devices
    measured:  measured seconds
    rows:      live rows of a single decoding step, if that was measured; else 0
    context:   tokens of each of them
    """

    row: Row
    call: Call
    mesh: Mesh
    measured: float
    rows: float = 0.0
    context: float = 0.0

    @property
    def goal(self) -> str:
        return self.row["kind"]

    def seconds(self, profile: DecodeProfile) -> float:
        if self.goal == "prefill":
            return prefill_cost(self.call, self.mesh, profile).seconds
        if self.rows:
            return step_cost(self.call, self.mesh, self.rows, self.context, profile).seconds
        return generate_cost(self.call, self.mesh, profile).seconds

    @property
    def flops(self) -> float:
        """Operations of all devices together."""
        call = self.call
        response = 0.0 if self.goal == "prefill" else call.mean_response
        tokens = self.rows or call.rows * (call.prompt + response)
        return 2 * call.model.parameters * tokens

    def roofline(self) -> float:
        """Return the larger of arithmetic and memory traffic at their peaks, for the prompts and for every step."""
        call, mesh = self.call, self.mesh
        peak = mesh.dims.tp * mesh.device.tflops * 1e12
        if self.goal == "prefill":
            return max(self.flops / peak, self._read(0, 0))
        if self.rows:
            return max(self.flops / peak, self._read(self.rows, self.context))
        live = min(call.rows, call.decode_rows)
        steps = max(call.rows / live * call.mean_response, call.longest_response)
        step = max(2 * call.model.parameters * live / peak, self._read(live, call.prompt + call.mean_response / 2))
        return 2 * call.model.parameters * call.rows * call.prompt / peak + steps * step

    def _read(self, rows: float, context: float) -> float:
        call, mesh = self.call, self.mesh
        size = call.item * call.model.parameters + rows * context * call.model.kv_bytes(call.cache_item)
        return size / (mesh.dims.tp * mesh.device.memory_gb_s * 1e9)


def predictions(directory: Path, profiles: Mapping[str, DecodeProfile] = DECODERS) -> list[Prediction]:
    """Return the predictions for all rows of decoding and prefill that can be read."""
    cases = read_cases(directory)[0]
    fraction = _constant_mfu(cases)
    return [_prediction(case, profiles[case.call.engine], fraction) for case in cases]


def _prediction(case: GenerationCase, profile: DecodeProfile, fraction: float) -> Prediction:
    naive = case.flops / (fraction * case.mesh.size * case.mesh.device.tflops * 1e12)
    group, name = case.row["group"], case.row["id"]
    return Prediction(case.goal, group, name, case.measured, case.seconds(profile), naive, case.roofline())


def _constant_mfu(cases: Sequence[GenerationCase]) -> float:
    """Return the fraction of peak arithmetic with the smallest mean error."""
    seconds = [(case.flops / (case.mesh.size * case.mesh.device.tflops * 1e12), case.measured) for case in cases]
    fractions = [peak / measured for peak, measured in seconds]
    return min(fractions, key=lambda share: mean(abs(peak / share / measured - 1) for peak, measured in seconds))


def fitted() -> tuple[str, ...]:
    """Return the names of every constant that the fit sets."""
    return (*(f"{field} of {', '.join(names)}" for names, fields in FITTED for field in fields), *OTHERS)


def read_cases(directory: Path, gain: float = FP8_GAIN) -> tuple[list[GenerationCase], list[str]]:
    """Return rows as calls, and names and reasons of those that are left out."""
    models = {_plain(name): model for name, model in read_models(directory).items()}
    lengths = json.loads((directory / "sharegpt320_lens.json").read_text())
    reader = _Reader(models, tuple(lengths["input_lens"]), tuple(lengths["output_lens"]), gain)
    cases, left_out = [], []
    for row in read_rows(directory, "measurements_calib"):
        if row["kind"] in ("decode", "prefill"):
            case = reader.case(row)
            if isinstance(case, GenerationCase):
                cases.append(case)
            else:
                left_out.append(f"{row['id']}: {case}")
    return cases, left_out


@dataclass(frozen=True)
class _Reader:
    models: dict[str, Transformer]
    prompts: tuple[float, ...]
    responses: tuple[float, ...]
    gain: float

    def case(self, row: Row) -> GenerationCase | str:
        """Return the row as a call, or why it cannot be one."""
        device, model, engine = device_of(row), self._model(row["model"]), _engine(row)
        if device is None or model is None or engine is None:
            return f"unknown {row['gpu'] if device is None else row['model'] if model is None else row['system']}"
        item = _item(row["dtype"] + " " + row["model"])
        if item is None:
            return f"dtype {row['dtype']}"
        mesh = _mesh(row, _at(device, item, self.gain))
        call = self._call(row, model, engine, item)
        call = _sized(row, call, mesh)
        seconds = _measured(row, call)
        if seconds is None:
            return f"metric {row['metric']} in {row['unit']}"
        if row["metric"] == "decode_step_time":
            return self._one_step(row, call, mesh, seconds)
        return GenerationCase(row, call, mesh, seconds)

    def _model(self, name: str) -> Transformer | None:
        plain = _plain(name)
        plain = ALIASES.get(plain, plain)
        return self.models.get(plain) or self.models.get(re.sub(r"^llama-3(\.\d)?-", "llama-3.1-", plain))

    def _call(self, row: Row, model: Transformer, engine: str, item: int) -> Call:
        stated = UNSTATED.get(engine, (mean(self.prompts), 0.0))
        prompt = _number(row["prompt_len"]) or stated[0]
        cache_item = 1 if item == 1 and engine.startswith("tensorrt-llm") else 2
        responses = self._responses(row, stated[1])
        return Call("generate", model, engine, 1, prompt, responses, prompt, item=item, cache_item=cache_item)

    def _responses(self, row: Row, stated: float) -> tuple[float, ...]:
        """Return response lengths: one for all, or ShareGPT's, with the mean that the row states."""
        length = _number(row["gen_len"])
        if "sharegpt" not in (row["prompt_len"] + row["call"]).lower():
            return (length or stated,)
        factor = length / mean(self.responses) if length else 1.0
        return tuple(sorted(factor * each for each in self.responses))

    def _one_step(self, row: Row, call: Call, mesh: Mesh, seconds: float) -> GenerationCase:
        """Return the case of one step: few live rows are the end of a batch, many are its first steps."""
        rows = _number(row["global_batch"]) or 1.0
        age = 0.8 * call.longest_response if rows < 32 else call.mean_response / 4
        return GenerationCase(row, call, mesh, seconds, rows, call.prompt + age)


def _engine(row: Row) -> str | None:
    text = f"{row['group'].split('/')[0]}/ {row['system']} {row['version']}".lower()
    return next((engine for pattern, engine in ENGINES if re.search(pattern, text)), None)


def _plain(name: str) -> str:
    """Return a model name without the parts that its shape does not depend on."""
    name = re.sub(r"\(.*?\)", "", name).strip().lower().removeprefix("meta-")
    return re.sub(r"-(instruct|chat|base|hf|it|fp8)\b.*", "", name)


def _item(text: str) -> int | None:
    """Return the bytes of a weight; None if they are no whole number."""
    text = text.lower()
    if re.search("int4|gptq|awq|4bit|4-bit|nf4|fp4", text):
        return None
    return 1 if re.search("fp8|int8|w8", text) else 2


def _at(device: DeviceClass, item: int, gain: float) -> DeviceClass:
    """Return ``device`` with eight-bit arithmetic, if supported."""
    if item != 1 or not device.name.startswith(FP8_FAMILIES):
        return device
    return replace(device, tflops=gain * device.tflops, attention=device.attention / gain)


def _number(text: str) -> float | None:
    """Return the first number in ``text``, or the middle of a range; None without one."""
    found = re.search(r"(\d+(?:\.\d+)?)(?:-(\d+))?", text.replace(",", ""))
    return mean(float(bound) for bound in found.groups() if bound) if found else None


def _mesh(row: Row, device: DeviceClass) -> Mesh:
    gpus = int(_number(row["n_gpus"]) or 1)
    stages = "device_map" in row["placement"] or row["system"].startswith("HF")
    tp = 1 if stages else int(_number(row["tp"]) or gpus)
    pp = gpus if stages else int(_number(row["pp"]) or 1)
    links = Links(device.link_gb_s, device.node_gb_s)
    return Mesh(device, links, dims=ParallelDims(tp, pp), per_node=min(8, gpus))


def _sized(row: Row, call: Call, mesh: Mesh) -> Call:
    """Return ``call`` with the batch of the row, and as many rows decoded together as fit into memory if the engine
    schedules them."""
    text = row["global_batch"] or row["micro_bs"] or "1"
    together = MOST_SEQUENCES.get(call.engine, 256)
    if "saturated" in text:
        together = min(together, _fitting(call, mesh))
        return replace(call, rows=STEADY_ROUNDS * together, decode_rows=together)
    rows = int(_number(text) or 1)
    stated = re.match(r"(\d+) \w+ prompts(?: \((\d+) for (\w+)\))?", row["call"])
    if stated:
        usual, fewer, size = stated.groups()
        prompts = int(fewer if fewer and size in row["model"] else usual)
        return replace(call, rows=prompts, decode_rows=min(rows, _fitting(call, mesh)))
    if not re.search("requests|prompts", text):
        return replace(call, rows=rows, decode_rows=rows)
    limit = rows if "burst" in row["call"] else together
    return replace(call, rows=rows, decode_rows=min(limit, _fitting(call, mesh)))


def _fitting(call: Call, mesh: Mesh) -> int:
    """Return the rows whose keys and values fit next to the weights; boards with HBM have as many GiB as they are sold
    with GB."""
    weights = call.item * call.model.parameters / mesh.dims.tp
    unit = 2**30 if mesh.device.memory_gb_s >= LEAST_HBM_GB_S else 1e9
    free = FREE_SHARE * mesh.device.memory_gb * unit - weights - FIXED_GB * 1e9
    row = call.model.kv_bytes(call.cache_item) / min(mesh.dims.tp, call.model.kv_heads)
    row *= call.prompt + call.mean_response
    return max(1, int(free / row))


def _measured(row: Row, call: Call) -> float | None:
    """Return the time of the whole call, or of the one step or pass that was measured, in seconds."""
    value, unit = float(row["value"]), row["unit"].lower()
    tokens = call.rows * call.mean_response
    if unit.startswith("out tokens/s"):
        return tokens / value / (float(row["n_gpus"] or 1) if "/gpu" in unit else 1.0)
    if unit.startswith("requests/s"):
        return call.rows / value
    return {"s": value, "ms": value / 1e3}.get(unit)


def show(items: Iterable[Prediction], every_row: bool) -> None:
    items = list(items)
    for item in items if every_row else ():
        ratio = item.predicted / item.measured
        print(f"  {item.goal} {item.group:30} {item.row:9} {item.measured:9.4f} s  x {ratio:.2f}")
    for key in ("group", "goal"):
        by = defaultdict(list)
        for item in items:
            by[item.goal if key == "goal" else f"{item.goal} {item.group}"].append(item)
        for name, some in sorted(by.items()):
            print(f"{name:40} {_summary(some)}")


def _summary(items: Sequence[Prediction]) -> str:
    errors = [item.error for item in items]
    naive = [mean(abs(value / item.measured - 1) for item, value in pairs) for pairs in _naive(items)]
    return (
        f"{len(items):4} rows  mean {mean(errors):.1%}  median {median(errors):.1%}  worst {max(errors):.1%}"
        f"  (constant MFU {naive[0]:.0%}, roofline {naive[1]:.0%})"
    )


def _naive(items: Sequence[Prediction]) -> list[list[tuple[Prediction, float]]]:
    return [[(item, item.constant_mfu) for item in items], [(item, item.roofline) for item in items]]


def fit_with_gain(directory: Path) -> tuple[float, dict[str, DecodeProfile]]:
    """Return the best ``FP8_GAIN`` of a few around the present one, and the constants fitted with it."""
    trials = []
    for gain in (0.93 * FP8_GAIN, FP8_GAIN, 1.07 * FP8_GAIN):
        cases = read_cases(directory, gain)[0]
        fitted = fit(cases)
        trials.append((_loss(fitted, cases), gain, fitted))
    _, gain, fitted = min(trials, key=lambda trial: trial[0])
    return gain, fitted


def fit(cases: Sequence[GenerationCase]) -> dict[str, DecodeProfile]:
    """Return fitted profiles by coordinate search: each constant of ``FITTED`` changes by ever smaller factors, while
    the mean error falls."""
    fitted = dict(DECODERS)
    for factor in (1.6, 1.25, 1.25, 1.1, 1.1, 1.03, 1.03):
        for engines, fields in FITTED:
            some = [case for case in cases if case.call.engine in engines]
            while _improved(fitted, engines, fields, some, factor):
                pass
    return fitted


def _improved(
    fitted: dict[str, DecodeProfile],
    engines: tuple[str, ...],
    fields: Sequence[str],
    cases: Sequence[GenerationCase],
    step: float,
) -> bool:
    best = start = _loss(fitted, cases)
    for field in fields:
        for factor in (step, 1 / step):
            trial = fitted | {name: _scaled(fitted[name], field, factor) for name in engines}
            loss = _loss(trial, cases)
            if loss < best and trial[engines[0]].cache <= MOST_CACHE:
                best = loss
                fitted.update(trial)
    return best < start - 1e-5


def _scaled(profile: DecodeProfile, field: str, factor: float) -> DecodeProfile:
    """Return ``profile`` with its ``field``, or its forward passes' one, times ``factor``."""
    if hasattr(profile, field):
        return replace(profile, **{field: factor * getattr(profile, field)})
    passes = replace(profile.passes, **{field: factor * getattr(profile.passes, field)})
    return replace(profile, passes=passes)


def _loss(profiles: dict[str, DecodeProfile], cases: Sequence[GenerationCase]) -> float:
    ratios = [case.seconds(profiles[case.call.engine]) / case.measured for case in cases]
    return mean(abs(ratio - 1) + (ratio - 1) ** 2 for ratio in ratios)


def _show_fit(fitted: dict[str, DecodeProfile]) -> None:
    for engines, fields in FITTED:
        profile = fitted[engines[0]]
        values = {field: getattr(profile if hasattr(profile, field) else profile.passes, field) for field in fields}
        print(", ".join(engines), {field: float(f"{value:.3g}") for field, value in values.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--fit", action="store_true", help="search the constants of the decode profiles")
    arguments = parser.parse_args()
    if arguments.fit:
        gain, fitted = fit_with_gain(arguments.directory)
        print(f"fp8 gain {gain:.3g}")
        _show_fit(fitted)
        show(predictions(arguments.directory, fitted), arguments.rows)
        return
    show(predictions(arguments.directory), arguments.rows)
    for line in read_cases(arguments.directory)[1]:
        print("left out:", line)


if __name__ == "__main__":
    main()
