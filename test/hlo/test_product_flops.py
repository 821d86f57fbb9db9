"""The work of a program is read from its products."""

import pytest

from torch_xla_pp.hlo import product_flops

pytestmark = pytest.mark.pure

HLO = """
ENTRY %main (x: f32[2,3,4], w: f32[5,4]) -> f32[5] {
  %x.1 = f32[2,3,4]{2,1,0} parameter(0)
  %w = f32[5,4]{1,0} parameter(1)
  %rows = f32[6,4]{1,0} bitcast(%x.1)
  %dot.6 = f32[6,5]{1,0} dot(%rows, %w), lhs_contracting_dims={1}, \
rhs_contracting_dims={1}, metadata={op_name="dot"}
  %dot = f32[2,3,3]{2,1,0} dot(%x.1, %x.1), lhs_batch_dims={0}, \
lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={2}
  %whole = f32[] dot(%rows, %rows), lhs_contracting_dims={0,1}, \
rhs_contracting_dims={0,1}
  ROOT %sum = f32[5]{0} reduce(%dot.6), dimensions={0}
}
"""


def test_a_product_is_two_operations_per_place_and_summed_size() -> None:
    assert product_flops(HLO) == 2 * (6 * 5 * 4 + 2 * 3 * 3 * 4 + 6 * 4)


@pytest.mark.parametrize("op", ["product", "product_sum", "product_bias"])
def test_a_product_of_a_library_counts_as_one_of_xla(op: str) -> None:
    call = f"""
  %product = f32[90]{{0}} custom-call(%left, %right), \
custom_call_target="torch_xla_pp.{op}.3.6.4.5.0.1", api_version=API_VERSION_TYPED_FFI
  %other = f32[30]{{0}} custom-call(%left), custom_call_target="torch_xla_pp.send.6.4"
"""
    assert product_flops(call) == 3 * 2 * 6 * 4 * 5
    assert product_flops(HLO + call) == product_flops(HLO) + 3 * 2 * 6 * 4 * 5


def test_attention_counts_as_its_products() -> None:
    def call(op: str) -> str:
        return (
            f'custom-call(%q), custom_call_target="torch_xla_pp.{op}.2.3.5.7.11.1.0.9"'
        )

    assert product_flops(call("attention")) == 2 * 2 * (2 * 3 * 5 * 7 * 11)
    assert product_flops(call("attention_grad")) == 5 * 2 * (2 * 3 * 5 * 7 * 11)


def test_a_program_without_products_does_nothing() -> None:
    assert product_flops("ENTRY %main () -> f32[] {\n}") == 0
