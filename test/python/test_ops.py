"""torch.ops.single_query from Python: schemas, results, refusals, fake tensors, torch.export and torch.compile.

usage: test_ops.py LIBRARY [unittest arguments]; exit status 77 where torch cannot be imported.
"""

import math
import sys
import unittest

try:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
except ImportError as error:
    print(f"skipped, torch cannot be imported: {error}")
    sys.exit(77)
try:
    import torch._functorch.aot_autograd

    NOT_TRACING = None
except ImportError as error:  # what torch imports only here may be missing
    NOT_TRACING = str(error)

OPTIONS = (
    "*, Tensor? attn_mask=None, float? scale=None, Tensor? lengths=None, Tensor? page_table=None, int? window=None, "
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, int? split_size=None"
)
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def ops():
    return torch.ops.single_query


def tensors(device="cpu", batch=2, query_heads=4, kv_heads=2, keys=37, head_dim=24, dtype=torch.float32):
    torch.manual_seed(0)

    def random(*shape):
        return torch.randn(*shape).to(device, dtype)

    cache = (batch, kv_heads, keys, head_dim)
    return random(batch, query_heads, head_dim), random(*cache), random(*cache)


def expected(query, key, value, mask=None):
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    return torch.nn.functional.scaled_dot_product_attention(query.double().unsqueeze(2), key, value, mask).squeeze(2)


def every_option(device, batch=2, query_heads=4, keys=37):
    torch.manual_seed(1)
    return {
        "attn_mask": torch.randn(query_heads, keys, device=device),
        "scale": 0.2,
        "lengths": torch.tensor([5, 30], device=device).expand(batch),
        "window": 9,
        "softcap": 4.0,
        "alibi_slopes": torch.rand(query_heads, device=device),
        "sinks": torch.randn(query_heads, device=device),
        "split_size": 16,
    }


class Operators(unittest.TestCase):
    def test_schemas_are_the_published_ones(self):
        arguments = "Tensor query, Tensor key, Tensor value, " + OPTIONS
        for op, schema in (
            (ops().attention.default, f"attention({arguments}) -> Tensor"),
            (ops().attention.out, f"attention.out({arguments}, Tensor(a!) out) -> Tensor(a!)"),
            (ops().attention_with_lse.default, f"attention_with_lse({arguments}) -> (Tensor output, Tensor lse)"),
            (ops().merge.default, "merge(Tensor outputs, Tensor lse) -> (Tensor output, Tensor lse)"),
        ):
            self.assertEqual(op._schema, torch._C.parse_schema("single_query::" + schema))
            self.assertIn(torch.Tag.pt2_compliant_tag, op.tags)

    def test_results_agree_with_scaled_dot_product_attention(self):
        for device in DEVICES:
            for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
                query, key, value = tensors(device, dtype=dtype)
                output = ops().attention(query, key, value)
                torch.testing.assert_close(output.double(), expected(query, key, value), atol=tolerance, rtol=tolerance)
                out = torch.full_like(query, math.nan)
                self.assertIs(ops().attention(query, key, value, out=out), out)
                self.assertTrue(torch.equal(out, output))

    def test_parts_merge_into_the_whole(self):
        for device in DEVICES:
            query, key, value = tensors(device)
            parts = [ops().attention_with_lse(query, key[:, :, a:b], value[:, :, a:b]) for a, b in ((0, 9), (9, 37))]
            output, lse = ops().merge(torch.stack([o for o, _ in parts]), torch.stack([l for _, l in parts]))
            torch.testing.assert_close(output.double(), expected(query, key, value), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(lse, ops().attention_with_lse(query, key, value)[1])

    def test_bad_arguments_raise_runtime_error_with_their_name(self):
        for device in DEVICES:
            query, key, value = tensors(device)
            for name, call in {
                "value": lambda: ops().attention(query, key, value[:, :, :3]),
                "head_dim": lambda: ops().attention(*(x[..., :0] for x in (query, key, value))),
                "lengths": lambda: ops().attention(query, key, value, lengths=torch.ones(2, device=device)),
                "window": lambda: ops().attention(query, key, value, window=0),
                "scale": lambda: ops().attention(query, key, value, scale=math.inf),
                " out ": lambda: ops().attention(query, key, value, out=query),
                "grad": lambda: ops().attention(query.clone().requires_grad_(), key, value),
            }.items():
                with self.assertRaisesRegex(RuntimeError, name):
                    call()

    def test_out_counts_as_modified(self):
        query, key, value = tensors()
        out = torch.empty_like(query)
        version = out._version
        ops().attention(query, key, value, out=out)
        self.assertGreater(out._version, version)


class FakeTensors(unittest.TestCase):
    def test_fake_tensors_get_shapes_and_refusals(self):
        with FakeTensorMode():
            for device in DEVICES:
                query, key, value = (torch.empty(x.shape, device=device) for x in tensors())
                output, lse = ops().attention_with_lse(query.unsqueeze(2), key, value)
                self.assertEqual((output.shape, lse.shape, lse.dtype), ((2, 4, 1, 24), (2, 4, 1), torch.float32))
                self.assertEqual(output.device.type, device)
                with self.assertRaisesRegex(RuntimeError, "value"):
                    ops().attention(query, key, value[:, :, :3])


@unittest.skipIf(NOT_TRACING, f"torch cannot trace: {NOT_TRACING}")
class Tracing(unittest.TestCase):
    def test_export_with_dynamic_sizes(self):
        class Decode(torch.nn.Module):
            def forward(self, query, key, value, lengths):
                output, lse = ops().attention_with_lse(query, key, value, lengths=lengths, window=20)
                parts, parts_lse = torch.stack([output, output]), torch.stack([lse, lse - 1])
                return ops().merge(parts, parts_lse), ops().attention(query * 2, key, value)

        batch, keys = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("keys", min=2, max=4096)
        for device in DEVICES:
            query, key, value = tensors(device)
            lengths = torch.tensor([5, 30], device=device)
            cache = {0: batch, 2: keys}
            program = torch.export.export(
                Decode(), (query, key, value, lengths), dynamic_shapes=({0: batch}, cache, cache, {0: batch})
            )
            query, key, value = tensors(device, batch=3, keys=129)
            lengths = torch.tensor([129, 0, 64], device=device)
            actual = program.module()(query, key, value, lengths)
            wanted = Decode()(query, key, value, lengths)
            for a, w in zip([*actual[0], actual[1]], [*wanted[0], wanted[1]]):
                self.assertTrue(torch.equal(a, w))

    def test_compile_traces_every_overload_whole(self):
        def every(query, key, value, out, options):
            ops().attention(query, key, value, out=out, **options)
            output, lse = ops().attention_with_lse(query + out, key, value, **options)
            merged = ops().merge(torch.stack([output, out]), torch.stack([lse, lse]))
            return output, lse, *merged, out + 1, ops().attention(output, key, value)

        for device in DEVICES:
            query, key, value = tensors(device)
            options = every_option(device)
            wanted_out, out = torch.empty_like(query), torch.empty_like(query)
            wanted = every(query, key, value, wanted_out, options)
            actual = torch.compile(every, backend="aot_eager", fullgraph=True)(query, key, value, out, options)
            for a, w in zip([*actual, out], [*wanted, wanted_out]):
                self.assertTrue(torch.equal(a, w))

    @unittest.skipUnless(torch.cuda.is_available(), "no GPU")
    def test_compile_with_cuda_graphs(self):
        query, key, value = tensors("cuda", keys=5000)
        lengths = torch.tensor([5000, 17], device="cuda")
        compiled = torch.compile(lambda *x: ops().attention(*x, lengths=lengths) * 1, backend="cudagraphs")
        with torch.no_grad():
            for length in (17, 1, 4999, 3, 5000):
                lengths.fill_(length)
                output = compiled(query, key, value).clone()
                self.assertTrue(torch.equal(output, ops().attention(query, key, value, lengths=lengths)))

    def test_opcheck(self):
        for device in DEVICES:
            query, key, value = tensors(device)
            out = torch.empty_like(query)
            page_table = torch.tensor([[1, 0], [2, -1]], dtype=torch.int32, device=device)
            paged = {"page_table": page_table, "lengths": torch.tensor([37, 20], device=device)}
            pool = torch.randn(3, 2, 20, 24, device=device)
            for op, arguments, options in (
                (ops().attention.default, (query, key, value), {}),
                (ops().attention.default, (query, key, value), every_option(device)),
                (ops().attention.default, (query, pool, pool.clone()), paged),
                (ops().attention_with_lse.default, (query, key, value), {}),
                (ops().attention.out, (query, key, value), {"out": out}),
                (ops().merge.default, (torch.stack([query, query]), torch.zeros(2, 2, 4, device=device)), {}),
            ):
                torch.library.opcheck(op, arguments, options)


if __name__ == "__main__":
    torch.ops.load_library(sys.argv.pop(1))
    unittest.main(verbosity=2)
