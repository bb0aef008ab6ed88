"""FLOPs, traffic and collectives, counted in programs whose count is known."""

import pathlib
import sys

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from jaxrl_async.assembly import dry_run
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.devices import tpu_chips
from jaxrl_async.planning import aot

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import hlo  # noqa: E402
import hlo_text  # noqa: E402

from configs import tiny as tiny_config  # noqa: E402

# As XLA for TPUs writes it: a loop with its bound in the condition, a matrix
# product as a convolution, a reduce-scatter as a fusion, a gather that is begun
# before the loop, goes on inside each trip, and ends after it; a result in fast
# memory.
TPU = """HloModule jit_f, is_scheduled=true, num_partitions=4

%all-reduce-scatter.1 (p: bf16[8,128]) -> bf16[2,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %sum = bf16[8,128]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=3, \
replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %part = bf16[2,128]{1,0} dynamic-slice(%sum), dynamic_slice_sizes={2,128}
}

%start (q: bf16[2,128]) -> (bf16[2,128], bf16[8,128]) {
  %q = bf16[2,128]{1,0} parameter(0)
  %g = bf16[8,128]{1,0} all-gather(%q), channel_id=5, \
replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %begun = (bf16[2,128]{1,0}, bf16[8,128]{1,0}) custom-call(%g), \
custom_call_target="AsyncCollectiveStart"
}

%step (q.1: bf16[2,128], r.1: bf16[8,128], n: bf16[8,128]) \
-> (bf16[8,128], bf16[2,128], bf16[8,128], bf16[8,128]) {
  %q.1 = bf16[2,128]{1,0} parameter(0)
  %r.1 = bf16[8,128]{1,0} parameter(1)
  %n = bf16[8,128]{1,0} parameter(2)
  %m = bf16[8,128]{1,0} all-reduce(%n), channel_id=7, \
replica_groups={{0,1,2,3}}, to_apply=%add
  %g.1 = bf16[8,128]{1,0} all-gather(%q.1), channel_id=5, \
replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %all = (bf16[8,128]{1,0}, bf16[2,128]{1,0}, bf16[8,128]{1,0}, \
bf16[8,128]{1,0}) tuple(%m, %q.1, %r.1, %g.1)
}

%done (q.2: bf16[2,128], r.2: bf16[8,128]) -> bf16[8,128] {
  %q.2 = bf16[2,128]{1,0} parameter(0)
  %r.2 = bf16[8,128]{1,0} parameter(1)
  %g.2 = bf16[8,128]{1,0} all-gather(%q.2), channel_id=5, \
replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}, \
frontend_attributes={chain_id="0"}
  ROOT %ended = bf16[8,128]{1,0} custom-call(%q.2, %r.2, %g.2), \
custom_call_target="AsyncCollectiveDone"
}

%condition (c: (s32[], bf16[8,128], bf16[2,128], bf16[8,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
  %c = (s32[]{:T(128)}, bf16[8,128]{1,0}, bf16[2,128]{1,0}, \
bf16[8,128]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %bound), direction=LT
}

%body (b: (s32[], bf16[8,128], bf16[2,128], bf16[8,128])) \
-> (s32[], bf16[8,128], bf16[2,128], bf16[8,128]) {
  %b = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[2,128]{1,0}, \
bf16[8,128]{1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%b), index=0
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%b), index=1
  %q.3 = bf16[2,128]{1,0} get-tuple-element(%b), index=2
  %r.3 = bf16[8,128]{1,0} get-tuple-element(%b), index=3
  %w = bf16[128,128]{1,0} constant({...})
  %y = f32[8,128]{1,0:T(8,128)S(1)} convolution(%x, %w), dim_labels=bf_io->bf
  %z = bf16[2,128]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %v = (bf16[8,128]{1,0}, bf16[2,128]{1,0}, bf16[8,128]{1,0}, \
bf16[8,128]{1,0}) fusion(%q.3, %r.3, %x), kind=kLoop, calls=%step
  %u = bf16[8,128]{1,0} get-tuple-element(%v), index=0
  %q.4 = bf16[2,128]{1,0} get-tuple-element(%v), index=1
  %r.4 = bf16[8,128]{1,0} get-tuple-element(%v), index=2
  ROOT %t = (s32[], bf16[8,128]{1,0}, bf16[2,128]{1,0}, \
bf16[8,128]{1,0}) tuple(%i.1, %u, %q.4, %r.4)
}

ENTRY %main (a: bf16[8,128], p.1: bf16[2,128]) -> bf16[8,128] {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = bf16[2,128]{1,0} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %s = (bf16[2,128]{1,0}, bf16[8,128]{1,0}) fusion(%p.1), kind=kCustom, \
calls=%start
  %q.5 = bf16[2,128]{1,0} get-tuple-element(%s), index=0
  %r.5 = bf16[8,128]{1,0} get-tuple-element(%s), index=1
  %k = (s32[]{:T(128)}, bf16[8,128]{1,0}, bf16[2,128]{1,0}, \
bf16[8,128]{1,0}) tuple(%zero, %a, %q.5, %r.5)
  %loop = (s32[]{:T(128)}, bf16[8,128]{1,0}, bf16[2,128]{1,0}, \
bf16[8,128]{1,0}) while(%k), condition=%condition, body=%body
  %q.6 = bf16[2,128]{1,0} get-tuple-element(%loop), index=2
  %r.6 = bf16[8,128]{1,0} get-tuple-element(%loop), index=3
  ROOT %e = bf16[8,128]{1,0} fusion(%q.6, %r.6), kind=kCustom, calls=%done
}
"""


# As XLA for TPUs writes a decode step: a matrix under another name inside of
# a fusion, a row written in place, a part fetched to fast memory beforehand.
DECODE = """HloModule jit_g, is_scheduled=true, num_partitions=1

%name_only (p: bf16[64,128]) -> bf16[128,64] {
  %p = bf16[64,128]{1,0} parameter(0)
  ROOT %same = bf16[128,64]{0,1} bitcast(%p)
}

%product (x: bf16[8,64], w: bf16[64,128]) -> bf16[8,128] {
  %x = bf16[8,64]{1,0} parameter(0)
  %w = bf16[64,128]{1,0} parameter(1)
  %v = bf16[128,64]{0,1} fusion(%w), kind=kLoop, calls=%name_only
  ROOT %y = bf16[8,128]{1,0} convolution(%x, %v), dim_labels=bf_oi->bf
}

%write (c: bf16[8,512,128], i: s32[8], u: bf16[8,128]) -> bf16[8,512,128] {
  %c = bf16[8,512,128]{2,1,0} parameter(0)
  %i = s32[8]{0} parameter(1)
  %u = bf16[8,128]{1,0} parameter(2)
  ROOT %s = bf16[8,512,128]{2,1,0} scatter(%c, %i, %u), to_apply=%keep
}

ENTRY %main (x.1: bf16[8,64], w.1: bf16[64,128], c.1: bf16[8,512,128]) \
-> bf16[2,512,128] {
  %x.1 = bf16[8,64]{1,0:S(1)} parameter(0)
  %w.1 = bf16[64,128]{1,0} parameter(1)
  %c.1 = bf16[8,512,128]{2,1,0} parameter(2)
  %i.1 = s32[8]{0:S(1)} constant({...})
  %u.1 = bf16[8,128]{1,0:S(1)} fusion(%x.1, %w.1), kind=kOutput, calls=%product
  %d.1 = bf16[8,512,128]{2,1,0} fusion(%c.1, %i.1, %u.1), kind=kCustom, \
calls=%write
  %b.1 = (bf16[8,512,128]{2,1,0}, bf16[2,512,128]{2,1,0:S(1)}, s32[]{:S(2)}) \
slice-start(%d.1), slice={[0:2], [0:512], [0:128]}
  ROOT %e.1 = bf16[2,512,128]{2,1,0:S(1)} slice-done(%b.1)
}
"""


def cost(function, *arguments, max_trips=1):
  compiled = jax.jit(function).lower(*arguments).compile()
  return hlo.Module(compiled.as_text(), max_trips).cost()


def over_eight(function):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(
    function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
  )


@pytest.mark.parametrize(
  ("kind", "collective", "sent"),
  [
    ("all-reduce", lambda x: jax.lax.psum(x, "x"), 2 * 4_096 * 7 / 8),
    (
      "all-gather",
      lambda x: jax.lax.all_gather(x, "x").sum(axis=0),
      8 * 4_096 * 7 / 8,
    ),
    (
      "reduce-scatter",
      lambda x: jax.lax.psum_scatter(x, "x", tiled=True).repeat(8),
      4_096 * 7 / 8,
    ),
    (
      "all-to-all",
      lambda x: jax.lax.all_to_all(
        x.reshape(8, 128), "x", 0, 0, tiled=True
      ).reshape(1_024),
      4_096 * 7 / 8,
    ),
    (
      "collective-permute",
      lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]),
      4_096,
    ),
  ],
)
def test_a_collective_in_a_loop_is_counted_with_what_it_sends(
  kind, collective, sent
):
  def loop(x):  # [1024] float32 a device
    return jax.lax.fori_loop(0, 5, lambda _, y: collective(y) * 0.5, x)

  found = cost(over_eight(loop), np.ones(8 * 1_024, np.float32)).collectives
  assert found.keys() == {kind}
  count, num_bytes = found[kind]
  assert count == 5
  assert num_bytes == pytest.approx(5 * sent)


def test_a_product_in_a_scan_counts_as_often_as_it_runs():
  def scanned(x, w):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

  x, w = np.ones((8, 16), np.float32), np.ones((7, 16, 16), np.float32)
  assert cost(scanned, x, w).flops == 7 * 2 * 8 * 16 * 16


def test_a_loop_that_the_data_ends_runs_as_often_as_it_is_told():
  def powers(x, n):
    return jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)

  x = np.ones((16, 16), np.float32)
  one, ten = (cost(powers, x, np.int32(3), max_trips=n) for n in (1, 10))
  assert one.flops == 2 * 16**3
  assert ten.flops == 10 * one.flops


@pytest.mark.parametrize(
  ("stride", "padding", "lhs_dilation", "rhs_dilation"),
  [(1, (0, 0), 1, 1), (2, (3, 1), 1, 2), (1, (2, 2), 3, 1)],
)
def test_a_convolution_counts_what_its_window_meets(
  stride, padding, lhs_dilation, rhs_dilation
):
  def convolve(x, w):
    return jax.lax.conv_general_dilated(
      x,
      w,
      (stride,),
      (padding,),
      lhs_dilation=(lhs_dilation,),
      rhs_dilation=(rhs_dilation,),
      dimension_numbers=("NHC", "HIO", "NHC"),
    )

  x, w = np.ones((2, 9, 5), np.float32), np.ones((4, 5, 6), np.float32)
  # Of ones, each result is the number of its products.
  products = np.asarray(convolve(x, w)).sum()
  module = jax.jit(convolve).lower(x, w).compiler_ir("hlo").as_hlo_text()
  assert hlo.Module(as_compiled(module)).cost().flops == 2 * products


def as_compiled(text):
  """HLO before compilation in the style of after: names with a %."""
  names = {
    line.split(" = ")[0].split()[-1]
    for line in text.splitlines()
    if " = " in line
  }
  for name in sorted(names, key=len, reverse=True):
    text = text.replace(name, f"%{name.lstrip('%')}")
  lines = [
    "ENTRY %main (x: f32[]) -> f32[] {" if line.startswith("ENTRY") else line
    for line in text.splitlines()
  ]
  return "\n".join(lines)


def test_loops_of_the_data_count_once_inside_each_other():
  def nested(count, x):
    def outer(_, x):
      return jax.lax.fori_loop(0, count[1], lambda _, x: x @ x, x @ x)

    return jax.lax.fori_loop(0, count[0], outer, x)

  x = np.ones((16, 16), np.float32)
  count = np.array([3, 5], np.int32)
  assert cost(nested, count, x, max_trips=7).flops == 7 * 2 * 2 * 16**3


def test_slices_are_moved_and_not_what_they_are_cut_from():
  def scanned(x, w):
    return jax.lax.scan(lambda x, w: (x * w + 1.0, None), x, w)[0]

  x, w = np.ones(1_024, np.float32), np.ones((64, 1_024), np.float32)
  moved = cost(scanned, x, w).hbm_bytes
  # Each trip reads a row and x and writes x; all of w each time were 64 times.
  assert 64 * 3 * 4_096 <= moved < 64 * 6 * 4_096


def test_what_xla_writes_for_a_tpu_is_understood():
  found = hlo.Module(TPU).cost()
  assert found.flops == 7 * 2 * 8 * 128 * 128
  sent = 3 / 4 * 8 * 128 * 2
  assert found.collectives == {
    "reduce-scatter": (7, 7 * sent),
    "all-gather": (1, sent),
    "all-reduce": (7, 7 * 2 * sent),  # beside a step, and no step itself
  }
  # x and w of the product (its result stays in fast memory), x and z of the
  # scatter, what the step reads and makes beside the gather, and what the
  # condition compares; once, what is gathered.
  row, part = 8 * 128 * 2, 2 * 128 * 2
  each = (row + 128 * 128 * 2) + (row + part) + 2 * row + 9
  assert found.hbm_bytes == 7 * each + part + row


@pytest.mark.parametrize(
  ("line", "kind", "sent"),
  [
    (
      "all-reduce-start = f32[1024]{0} all-reduce-start(%x),"
      " replica_groups={{0,1,2,3}}, to_apply=%add",
      "all-reduce",
      2 * 3 / 4 * 4_096,
    ),
    (
      "all-gather-start = (f32[1024]{0}, f32[4096]{0}) all-gather-start(%x),"
      " replica_groups={{0,1,2,3}}, dimensions={0}",
      "all-gather",
      3 / 4 * 4 * 4_096,
    ),
  ],
)
def test_a_start_returns_its_result_with_or_without_what_it_was_given(
  line, kind, sent
):
  text = "\n".join(
    [
      "HloModule m, num_partitions=4",
      "",
      "ENTRY %main (x: f32[1024]) -> f32[1024] {",
      "  %x = f32[1024]{0} parameter(0)",
      f"  ROOT %{line}",
      "}",
    ]
  )
  assert hlo.Module(text).cost().collectives == {kind: (1.0, sent)}


def test_a_fusion_that_runs_beside_others_costs_what_it_costs_alone():
  """XLA for GPUs begins some with fusion-start, and awaits fusion-done."""
  text = """HloModule m

%fused (p: f32[64,32], i: s32[], w: f32[32,8]) -> f32[1,8] {
  %p = f32[64,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,32]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,32}
  %w = f32[32,8]{1,0} parameter(2)
  ROOT %dot = f32[1,8]{1,0} dot(%row, %w), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

ENTRY %main (x: f32[64,32], n: s32[], w: f32[32,8]) -> f32[1,8] {
  %x = f32[64,32]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %w = f32[32,8]{1,0} parameter(2)
"""
  called = "(%x, %n, %w), kind=kCustom, calls=%fused\n"
  alone = f"  ROOT %y = f32[1,8]{{1,0}} fusion{called}}}"
  beside = (
    "  %begun = ((f32[64,32]{1,0}, s32[], f32[32,8]{1,0}), f32[1,8]{1,0},"
    f" u32[]) fusion-start{called}"
    "  ROOT %y = f32[1,8]{1,0} fusion-done(%begun)\n}"
  )
  expected = hlo.Module(text + alone).cost()
  assert expected.flops == 2 * 32 * 8
  assert expected.hbm_bytes == 4 * (32 + 1 + 32 * 8 + 8)
  assert hlo.Module(text + beside).cost() == expected


@pytest.mark.parametrize(
  ("groups", "size"),
  [
    ("{{0,1},{2,3},{4,5},{6,7}}", 2),
    ("[2,4]<=[8]", 4),
    ("[4,2]<=[2,4]T(1,0)", 2),
    ("mesh['a'=2,'b'=4] {'b'}", 4),
    ("mesh['a'=2,'b'=4] {'a','b'}", 8),
    ("mesh['a'=8] {'a':(1)4}", 4),
    ("{}", 8),
  ],
)
def test_groups_are_written_in_several_ways(groups, size):
  attributes = f"%x), channel_id=1, replica_groups={groups}, to_apply=%add"
  assert hlo_text.group_size(attributes, 8) == size


def test_a_condition_costs_its_dearest_branch():
  def either(which, x):
    return jax.lax.cond(which, lambda x: x @ x, lambda x: x + 1.0, x)

  x = jnp.ones((16, 16), jnp.float32)
  assert cost(either, np.bool_(True), x).flops == 2 * 16**3


def test_only_what_is_read_written_or_fetched_moves():
  cost = hlo.Module(DECODE).cost()
  matrix, written, fetched = 2 * 64 * 128, 2 * 8 * 128, 2 * 2 * 512 * 128
  assert cost.hbm_bytes == matrix + written + fetched
  assert cost.flops == 2 * 8 * 64 * 128


def test_the_least_time_is_work_over_rate_for_each_rate():
  chip = tpu_chips.Chip(
    kind="test",
    hbm_bytes=2.0**30,
    flops_per_s=1e12,
    hbm_bytes_per_s=1e9,
    ici_bytes_per_s=1e8,
    slices=(),
  )
  kinds = {"all-gather": (5.0, 1e8), "all-reduce": (2.0, 4e8)}
  times_s = hlo.roofline_s(hlo.Cost(3e12, 2e9, kinds), chip)
  assert times_s == {"products": 3.0, "memory": 2.0, "links": 5.0}


@pytest.mark.slow
def test_the_flops_of_a_step_are_those_of_arithmetic():
  config = tiny_config.get_config()
  setup = setup_lib.resolve(config, jax.devices()[:2])
  slices, attention = dry_run.programs(setup)
  found = {
    x.name: aot.compile_program(x) for side in slices.values() for x in side
  }
  assert attention == "packed rows xla, prefill xla, decode xla over slots"
  assert all(x.memory_bytes > 0 and not x.refusal for x in found.values())

  def flops(name):
    text = found[name].executable.as_text()
    return hlo.Module(text, setup.max_microbatches).cost().flops

  model = setup.model
  batch = 2 * 1 * 4 * 48  # minibatches, microbatches, rows, tokens
  attended = 4 * model.num_layers * model.num_heads * model.head_dim * 48
  forward = (2 * model.num_params + attended) * batch
  # Norms and biases are parameters without a product.
  assert flops("proximal") == pytest.approx(forward, rel=0.03)
  assert flops("update") == pytest.approx(3 * forward, rel=0.05)
  slots, steps = config.rollout.num_slots, config.rollout.decode_steps_per_call
  attended = attended // 48 * config.rollout.cache_tokens
  decode = (2 * model.num_params + attended) * slots * steps
  assert flops("decode") == pytest.approx(decode, rel=0.03)
