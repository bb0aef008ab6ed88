"""Tokens per second of a train step, against PyTorch and the matmul rate.

    python benchmarks/train_step.py

The trainer packs trajectories of lognormal lengths (packed_lengths.py). It then
computes proximal logprobs and one update, with random weights. Without --rows
the rows are those of the platform. On a CPU two devices share each microbatch.

Each repeat takes turns between this and three others: the rate of large matrix
products; the same update with next-token cross-entropy as its loss; and that
update with PyTorch, in a process that waits meanwhile (transformers_train.py,
which needs the dependency group `reference`). Everything has been done once
before, so compiling is not counted.

    tokens_per_s     of an update; padding does not count
    mfu              FLOPs of the model over the update's time and the matmul
                     rate: 6 for each parameter and token, and 12 for each
                     layer, head, head dimension and pair of tokens that see
                     each other. What is computed twice counts once.
    vs_cross_entropy the time of the update over that with cross-entropy
    proximal         time of the proximal forward over that of the update
    vs_torch         tokens_per_s over PyTorch's, with cross-entropy in both
    peak_bytes       of the compiled update, state and batch included
    compilations     programs that were compiled for trainer and comparison

Hardware: two CPU cores, float32, for the rows that begin with cpu. The other
rows need a GPU, and use bfloat16 with float32 master weights. Time: three
minutes. Result: docs/project/results.md has the table, and
docs/project/notebook.md that of a GPU.

The last line of standard output is one JSON object.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

# Leave the other process its share of the device's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from absl import app
from absl import flags
import jax
import numpy as np
import packed_lengths
import side_by_side
import workloads

from jaxrl_async import types
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.planning import aot
from jaxrl_async.planning import matmul_rate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import sft
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A model and the shape of its batches.

  Attributes:
    scale: lengths are those of packed_lengths.py divided by this.
    num_trajectories: trajectories of an update.
  """

  model: configs.ModelConfig
  dtype: str
  scale: int
  rows_per_microbatch: int
  num_trajectories: int
  vocab_chunk: int
  remat: sections.Remat

  @property
  def tokens_per_row(self) -> int:
    """Return the length of the longest trajectory."""
    return packed_lengths.MAX_TOKENS // self.scale


def _cpu_case(name: str, num_trajectories: int = 256, rows: int = 2) -> Case:
  return Case(
    model=workloads.CPU_CASES[name].model,
    dtype="float32",
    scale=16,
    rows_per_microbatch=rows,
    num_trajectories=num_trajectories,
    vocab_chunk=2**16,  # the whole vocabulary in all cases
    remat=sections.Remat.DOTS,
  )


def _gpu_case(name: str) -> Case:
  return Case(
    model=configs.MODELS[name],
    dtype="bfloat16",
    scale=1,
    rows_per_microbatch=2,
    num_trajectories=256,
    vocab_chunk=4_096,
    remat=sections.Remat.DOTS,
  )


_CPU_CASES = {name: _cpu_case(name) for name in ("cpu-1m", "cpu-10m")}
_CPU_CASES["cpu-135m"] = _cpu_case("cpu-135m", num_trajectories=64, rows=4)
_GPU_CASES = {
  f"{name.removeprefix('qwen2-')}-8k": _gpu_case(name)
  for name in ("qwen2-0.5b", "qwen2-1.5b")
}
_CASES = _CPU_CASES | _GPU_CASES
_ROWS = flags.DEFINE_list(
  "rows",
  None,
  f"Cases to measure, by default the platform's: {', '.join(_CASES)}.",
)
flags.register_validator(
  _ROWS, lambda rows: set(rows or ()) <= _CASES.keys(), "names of cases"
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 3, "How often each row is measured.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and lengths.")
_DTYPE = flags.DEFINE_enum(
  "dtype", None, ["float32", "bfloat16"], "Dtype; by default the case's."
)
_REMAT = flags.DEFINE_enum_class(
  "remat", None, sections.Remat, "Rematerialisation; by default the case's."
)
_ATTENTION = flags.DEFINE_string(
  "attention", kernel_names.AUTO, "Attention, as in train.attention."
)
_ROWS_PER_MICROBATCH = flags.DEFINE_integer(
  "rows_per_microbatch",
  0,
  "Rows of a microbatch; 0 takes the case's.",
  lower_bound=0,
)
_VOCAB_CHUNK = flags.DEFINE_integer(
  "vocab_chunk", 0, "Entries of a chunk; 0 takes the case's.", lower_bound=0
)
_DEVICES = flags.DEFINE_integer(
  "devices",
  0,
  "Devices that share the rows of a microbatch; 0 is two on a CPU, one GPU.",
  lower_bound=0,
)
_TORCH = flags.DEFINE_boolean("torch", True, "Compare with PyTorch.")

_COLUMNS = {
  "case": "",
  "tokens_per_s": ",.0f",
  "mfu": ".3f",
  "vs_cross_entropy": ".3f",
  "proximal": ".2f",
  "torch_tokens_per_s": ",.0f",
  "vs_torch": ".2f",
  "pack_efficiency": ".3f",
  "peak_bytes": ",",
  "compile_s": ".0f",
  "compilations": "",
}
# One device per core, because elementwise work uses one core of its device.
_CPU_DEVICES = 2
_OPTIMIZER = sections.OptimizerSection(learning_rate=1e-4)


def _devices() -> list[Any]:
  is_cpu = jax.default_backend() == "cpu"
  wanted = _DEVICES.value or (_CPU_DEVICES if is_cpu else 1)
  if wanted > jax.device_count():
    sys.exit(f"error: {wanted} devices; there are {jax.device_count()}")
  return jax.devices()[:wanted]


class Ours:
  """A trainer, a prepared batch, and the update with cross-entropy."""

  def __init__(self, case: Case, lengths: np.ndarray):
    devices = _devices()
    mesh = mesh_lib.make_mesh(devices, mesh_lib.MeshShape(data=len(devices)))
    layout = mesh_lib.Layout(mesh=mesh, rules=mesh_lib.TRAIN_RULES)
    forward = train_step.ForwardSettings(
      model=case.model,
      compute_dtype=case.dtype,
      remat=_REMAT.value or case.remat,
      attention=choice.for_training(
        _ATTENTION.value,
        heads=(
          case.model.num_heads,
          case.model.num_kv_heads,
          case.model.head_dim,
        ),
        tokens_per_row=case.tokens_per_row,
        dtype=jax.numpy.dtype(case.dtype),
        layout=layout,
        sliding_windows=case.model.windows_within(case.tokens_per_row),
      ),
      temperature=1.0,
      vocab_chunk=_VOCAB_CHUNK.value or case.vocab_chunk,
      layout=layout,
    )
    rows = _ROWS_PER_MICROBATCH.value or case.rows_per_microbatch
    group = packed_lengths.make_group(lengths, case.model.vocab_size)
    for i, trajectory in enumerate(group.trajectories):
      trajectory.reward = types.Reward(score=float(i % 2))
    _, placement = packed_lengths.pack(
      lengths, tokens_per_row=case.tokens_per_row, rows=rows
    )
    models = {
      train_state.POLICY: train_state.ModelSettings(
        model=case.model, optimizer=_OPTIMIZER
      )
    }
    self.trainer = trainer_lib.Trainer(
      mesh=mesh,
      models=models,
      forward=forward,
      loss=algorithm_lib.policy_loss(
        sections.Config(
          algorithm=sections.AlgorithmSection(
            behavior_weight_cap_mode=sections.BehaviorWeightCapMode.TRUNCATE
          )
        )
      ),
      stages=[train_step.PROXIMAL_STAGE],
      batch=packing.BatchSettings(
        tokens_per_row=case.tokens_per_row,
        rows_per_microbatch=rows,
        num_minibatches=1,
        min_microbatches=placement.shape[1],
        advantages=algorithm_lib.advantages(sections.AlgorithmSection()),
      ),
      num_steps=1_000,
      decay=1.0,
      rollout_dtype=case.dtype,
      busy=metrics_lib.BusyClock(),
    )
    init = functools.partial(transformer.init_params, case.model)
    params = jax.jit(init)(jax.random.key(_SEED.value))
    self.trainer.start({train_state.POLICY: params})
    self.batch = self.trainer.prepare([group])
    self._plain = jax.jit(
      functools.partial(
        train_step.update,
        forward,
        sft.NEXT_TOKEN.loss,
        objectives.no_diagnostic,
        train_step.make_optimizers(models),
      ),
      donate_argnums=0,
      out_shardings=(
        jax.tree.map(lambda x: x.sharding, self.trainer.abstract_state()),
        None,
      ),
    )
    self._num_steps = 0

  def step(self) -> dict[str, float]:
    """Return the seconds of both programs of a train step."""
    done = self.trainer.step(self._num_steps, self.batch)
    self._num_steps += 1
    return done.times_s

  def plain_s(self) -> float:
    """Return the seconds of the update with cross-entropy."""
    start_s = time.perf_counter()
    self.trainer.state, values = self._plain(
      self.trainer.state, self.batch.arrays, np.int32(0)
    )
    jax.block_until_ready(values)
    return time.perf_counter() - start_s


def _reference(
  case: Case, batch: trainer_lib.PreparedBatch, directory: pathlib.Path
) -> side_by_side.Reference:
  arrays = directory / "batch.npz"
  names = ("tokens", "segment_ids", "positions", "loss_mask")
  np.savez(
    arrays,
    **{name: np.asarray(getattr(batch.arrays, name))[0] for name in names},
  )
  return side_by_side.Reference(
    "transformers_train.py",
    directory / "work.json",
    {
      "model": dataclasses.asdict(case.model),
      "dtype": case.dtype,
      "learning_rate": _OPTIMIZER.learning_rate,
      "batch": str(arrays),
    },
  )


def _row(name: str, directory: pathlib.Path) -> dict[str, Any]:
  """Measure one case against cross-entropy, PyTorch and the matmul rate."""
  case = _CASES[name]
  case = dataclasses.replace(case, dtype=_DTYPE.value or case.dtype)
  lengths = packed_lengths.draw_lengths(
    case.num_trajectories, _SEED.value, scale=case.scale
  )
  num_tokens = int(lengths.sum())
  with metrics_lib.CompilationCounter() as compilations:
    ours = Ours(case, lengths)
    ours.step()
    ours.plain_s()
  update = next(p for p in ours.trainer.programs() if p.name == "update")
  compiled = aot.compile_program(update)
  reference = None
  if _TORCH.value and side_by_side.has_transformers():
    reference = _reference(case, ours.batch, directory)
  width = 1_024 if jax.default_backend() == "cpu" else 8_192
  runs, theirs = [], []
  for _ in range(_REPEATS.value):
    rate = max(
      matmul_rate.measured_matmul_flops(_devices(), case.dtype, width)
      for _ in range(5)
    )
    times_s, plain_s = ours.step(), ours.plain_s()
    update_s = times_s["update_s"]
    runs.append(
      {
        "tokens_per_s": num_tokens / update_s,
        "plain_tokens_per_s": num_tokens / plain_s,
        "mfu": matmul_rate.model_flops(case.model, lengths) / update_s / rate,
        "matmul_flops_per_s": rate,
        "vs_cross_entropy": update_s / plain_s,
        "proximal": times_s["proximal_s"] / update_s,
        "update_s": update_s,
      }
    )
    if reference:
      theirs.append(reference.run())
  row: dict[str, Any] = {
    "case": name,
    "num_params": case.model.num_params,
    "num_tokens": num_tokens,
    "attention": ours.trainer.forward.attention,
    "remat": ours.trainer.forward.remat.value,
    **side_by_side.median(runs),
    "mfu_repeats": [run["mfu"] for run in runs],
    "torch_tokens_per_s": None,
    "vs_torch": None,
    "pack_efficiency": ours.batch.segments.pack_efficiency,
    "peak_bytes": compiled.memory_bytes,
    "compile_s": compilations.total_s,
    "compilations": compilations.num_compiled,
  }
  if reference:
    reference.close()
    row |= {
      "torch_tokens_per_s": side_by_side.median(theirs)["tokens_per_s"],
      "torch_variant": theirs[0]["variant"],
      "vs_torch": statistics.median(
        run["plain_tokens_per_s"] / other["tokens_per_s"]
        for run, other in zip(runs, theirs, strict=True)
      ),
    }
  return row


def main(argv: Sequence[str]) -> None:
  """Measure every row and print the results."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  jax.config.update("jax_num_cpu_devices", _DEVICES.value or _CPU_DEVICES)
  is_cpu = jax.default_backend() == "cpu"
  names = _ROWS.value or list(_CPU_CASES if is_cpu else _GPU_CASES)
  rows = []
  for name in names:
    print(f"{name}: {_CASES[name].model.num_params:,} parameters", flush=True)
    with tempfile.TemporaryDirectory(prefix="train_step_") as directory:
      rows.append(_row(name, pathlib.Path(directory)))
  print(side_by_side.table(rows, _COLUMNS))
  full = packed_lengths.draw_lengths(512, _SEED.value)
  sizes = {"tokens_per_row": packed_lengths.MAX_TOKENS, "rows": 1}
  result = {
    "rows": rows,
    "pack_efficiency": packed_lengths.pack_efficiency(full, **sizes),
    "pack_gain_over_padding": packed_lengths.pack_gain_over_padding(
      full, **sizes
    ),
    "device": jax.devices()[0].device_kind,
    "num_cores": len(os.sched_getaffinity(0)),
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
