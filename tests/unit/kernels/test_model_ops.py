"""The combiner's products and their derivative, for every number of products."""

import pytest
import torch

from tscale.kernels.model_ops import combine


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_products_pair_features_by_xor_and_the_derivative_follows(rows):
    noise = torch.Generator().manual_seed(rows)
    c, a = (torch.randn(2, 8, 3, generator=noise, dtype=torch.float64, requires_grad=True) for _ in range(2))
    products = combine(c, a, rows)
    expected = torch.stack(
        [
            c[h, i ^ row] * a[h, i]
            for h in range(2)
            for block in range(8 // rows)
            for row in range(rows)
            for i in range(block * rows, (block + 1) * rows)
        ]
    )
    assert torch.equal(products, expected)
    assert torch.autograd.gradcheck(lambda c, a: combine(c, a, rows), (c, a))
