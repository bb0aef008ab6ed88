"""The names that are known without JAX are those of the implementations."""

import pytest

from jaxrl_async.config import sections
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.models.attention import paged_attention
from jaxrl_async.models.attention import reference


def test_the_names_are_those_of_the_implementations():
  assert kernel_names.PACKED == tuple(packed_attention.IMPLEMENTATIONS)
  assert kernel_names.PREFILL == tuple(reference.CAUSAL)
  assert kernel_names.DECODE == tuple(paged_attention.IMPLEMENTATIONS)


def test_a_kernel_that_reads_pages_wants_a_cache_of_pages():
  for name in (kernel_names.AUTO, "xla", "cudnn"):
    kernel_names.check_rollout(name, has_pages=False)
  kernel_names.check_rollout("gpu_paged", has_pages=True)
  with pytest.raises(sections.ConfigError, match="^rollout.attention: .*pages"):
    kernel_names.check_rollout("gpu_paged", has_pages=False)
