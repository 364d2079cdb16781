"""Random stages as source code: `write(seed)`.

Kinds of values: bd [b, 4], bkd [b, 3, 4], dd [4, 4], d [4], s [], Ldd [3, 4, 4], i an index below
3, ib [b] of them below 4. A name is its kind and a number.
"""

from __future__ import annotations

import random
import re

EYE = "4 * jnp.eye(4)"
# What makes a value of a kind out of others, named by their kinds; one expression between bars.
_EXPRESSIONS = {
    "bd": """
        jnp.tanh({bd}) | {bd} * {d} | {bd} + {d} | {bd} * {s} | {bd} @ {dd} | {bd} @ {dd}.T
        {bd} - {bd} | {bd} * {bd} | jnp.einsum('bd,ed->be', {bd}, {dd}) | ({dd} @ {bd}.T).T
        jnp.einsum('bd,de,be->bd', {bd}, {dd}, {bd}) | {bd} @ CDD + CD
        {bd} @ {dd}[:, :2] @ {dd}[:2]
        jnp.concatenate([{bd}[:, :2], {bd}[:, 2:]], -1) | jax.nn.softmax({bd}, -1)
        jnp.concatenate([{bd}, {bd}], -1) @ jnp.concatenate([{dd}, {dd}])
        jax.nn.standardize({bd}, epsilon=1e-2) * {d} | jnp.where({bd} > 0, {bd}, {bd})
        jnp.where({s} > 0, {bd}, {bd}) | jnp.cumsum({bd}, -1) | jnp.sort({bd}, -1)
        jax.lax.top_k({bd}, 2)[0] @ {dd}[:2] | {dd}[{ib}] | jax.nn.one_hot({ib}, 4) @ {dd}
        jax.nn.one_hot({ib}, 4) * {s} | jnp.zeros_like({bd}).at[:, 1:3].add({bd}[:, :2])
        {bd}.at[jnp.arange({bd}.shape[0]), {ib}].set({s}) | {bd}.at[:, {i}].add({s})
        {bd}.at[:, ::2].multiply(2.0) | jax.lax.stop_gradient({bd}) | {bkd}[:, 1] | {bkd}[:, {i}]
        {bkd}.sum(1) | jnp.einsum('bkd,kde->be', {bkd}, {Ldd}) | {bkd}.max(1)
        jnp.cumprod({bd}, -1)
        jnp.linalg.solve({dd} + EYE, {bd}.T).T | jax.nn.gelu({bd}) | jax.nn.relu({bd})
        jax.nn.gelu({bd}, approximate=False) | {bd} / (1 + {bd} ** 2) | {bd}[:, ::-1]
        jnp.roll({bd}, 1, -1) | jnp.maximum({bd}, {bd}) | jnp.broadcast_to({d}, {bd}.shape)
        {bd}.mean(-1, keepdims=True) + {d} | ({bd} @ {d})[:, None] * {bd} | jax.nn.sigmoid({bd})
        jax.lax.dynamic_slice_in_dim(jnp.concatenate([{bd}, {bd}], -1), {i}, 4, 1)
        jax.nn.logsumexp({bd}, -1, keepdims=True) - {bd} | jnp.pad({bd}[:, :3], ((0, 0), (1, 0)))
        jnp.take({bd}, {i}, 1)[:, None] + {d} | jnp.tensordot({bkd}, {Ldd}, ([1, 2], [0, 1]))
        jnp.take_along_axis({bd}, jnp.argsort({bd}, -1), -1) | jax.lax.optimization_barrier({bd})
        jax.lax.dot_general({bd}, {dd}, (((1,), (1,)), ((), ())))
        jnp.split({bd}, 2, -1)[0] @ {dd}[1:3]
        jax.lax.reduce_precision({bd}, 8, 12) | jax.jit(lambda a, b: {bd} @ a @ b)({dd}, {dd})
        jax.scipy.linalg.solve_triangular(jnp.tril({dd}) + EYE, {bd}.T, lower=True).T
    """,
    "bkd": """
        jnp.stack([{bd}, {bd}, {bd}], 1) | jnp.einsum('bd,kde->bke', {bd}, {Ldd}) | {bkd} @ {dd}
        jax.nn.softmax(jnp.einsum('bkd,bjd->bkj', {bkd}, {bkd})) @ {bkd} | jnp.cumsum({bkd}, 1)
        jax.lax.associative_scan(jnp.multiply, {bkd}, axis=1) | {bkd} * {bd}[:, None]
        jnp.tanh({bkd}) | jax.nn.softmax({bkd}, 1)
        {bkd}.reshape(-1, 12).reshape(-1, 3, 4)[:, ::-1]
        {bkd}.at[:, {i}].set({bd}) | {bkd}.at[:, jnp.array([0, 0, 2])].add({bkd})
        jnp.repeat({bd}[:, None], 3, 1) | jax.vmap(lambda a, w: a @ w, (1, 0), 1)({bkd}, {Ldd})
        jnp.einsum('bkd,kde->bke', {bkd}, {Ldd}) | {bkd}[:, [2, 0, 0]] | {bkd} + {bkd}
        jax.lax.conv_general_dilated({bkd}, {Ldd}, (1,), 'SAME', dimension_numbers=NHC)
        jnp.swapaxes({dd} @ jnp.swapaxes({bkd}, 1, 2), 1, 2) | jnp.where({bkd} > 0, {bkd}, {d})
    """,
    "dd": """
        {dd} @ {dd} | {dd}.T | {dd} * {d} | {dd} + {dd} | jnp.outer({d}, {d}) | {Ldd}[1]
        {Ldd}[{i}]
        {Ldd}.sum(0) | {dd} * CDD | jax.lax.dynamic_index_in_dim({Ldd}, {i}, keepdims=False)
        jnp.linalg.inv({dd} + EYE) | jax.nn.softmax({dd}) | jnp.diag({d}) | jnp.tril({dd})
        jnp.linalg.cholesky({dd} @ {dd}.T + jnp.eye(4)) | {dd}.at[{i}].set({d}) | jnp.tanh({dd})
        {dd}.at[CI].add({dd}[1:3]) | {dd} / jnp.linalg.norm({dd}) | jax.lax.stop_gradient({dd})
        jnp.einsum('kij,kjl->il', {Ldd}, {Ldd}) | jnp.full((4, 4), {s})
        jnp.linalg.qr({dd} + EYE)[0] | jnp.stack([{d}, {d}, {d}, {d}])
    """,
    "d": """
        {dd}[0] | {dd}[{i}] | {dd}[:, 1] | {dd}.sum(0) | {dd} @ {d} | {d} * {s} | jnp.diagonal({dd})
        jnp.tanh({d}) | jnp.sort({d}) | jax.nn.softmax({d}) | jnp.cumsum({d}) | {Ldd}[0, :, 2]
        jnp.linalg.solve({dd} + EYE, {d}) | {d}[jnp.array([3, 1, 1, 0])] | jax.lax.top_k({d}, 4)[0]
        jnp.zeros(4).at[1].set({s}) + {d} | {dd}.max(1) | jnp.einsum('ij,i->j', {dd}, {d})
        {d} + CD
    """,
    "s": """
        {d}[2] | {d}.sum() | {d} @ {d} | jnp.linalg.norm({dd}) | {s} * 0.5 | jnp.trace({dd})
        {d}[{i}]
        {Ldd}.mean() | jnp.max({dd}) | jnp.linalg.slogdet({dd} + EYE)[1] | jnp.sin({s})
        {dd}[1, {i}]
    """,
    "i": "jnp.argmax({d}[:3]) | jnp.clip(({s} * 3).astype(jnp.int32), 0, 2)",
    "ib": "jnp.argmax({bd}, -1) | jnp.argmin({bd} @ {dd}, -1)",
    "Ldd": """
        jnp.stack([{dd}, {dd}, {dd}]) | {Ldd} * {d} | {Ldd} @ {dd} | {Ldd} + {dd} | {Ldd}[::-1]
        jax.lax.associative_scan(jnp.matmul, {Ldd}) | jnp.tanh({Ldd}) | jnp.swapaxes({Ldd}, 1, 2)
        jax.vmap(lambda a: a @ {dd})({Ldd}) | jax.lax.map(lambda a: jnp.tanh(a @ {dd}), {Ldd})
        {Ldd}.at[{i}].set({dd}) | jax.lax.cumsum({Ldd})
    """,
}
EXPRESSIONS = {
    kind: [
        text.strip().replace("EYE", EYE)
        for line in lines.strip().splitlines()
        for text in line.split(" | ")
    ]
    for kind, lines in _EXPRESSIONS.items()
}
LIKELY = ["bd"] * 8 + ["bkd"] * 3 + ["dd"] * 3 + ["d", "s", "Ldd", "i", "ib"]
POLICIES = ["", ""] + [
    f", policy=jax.checkpoint_policies.{name}"
    for name in ("dots_saveable", "nothing_saveable", "everything_saveable")
]
# Differentiated by hand: what is made, of what, the body, the gradients for both operands.
CUSTOM = [
    (
        *("bd", ["bd", "dd"], "jnp.tanh({0} @ {1})"),
        "({3} * (1 - {2} ** 2)) @ {1}.T, {0}.T @ ({3} * (1 - {2} ** 2))",
    ),
    ("bd", ["bd", "d"], "{0} * {1}", "{3} * {1}, ({3} * {0}).sum(0)"),
    ("bd", ["bd", "d"], "{0} * {1}", "{3} * {1}, jnp.zeros_like({1})"),
    ("dd", ["dd", "dd"], "{0} @ {1}", "{3} @ {1}.T, {0}.T @ {3}"),
    (
        *("bd", ["bd", "s"]),
        "jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * {1}), (0, {0}))[1]",
        "{3} * {1} ** 3, 3 * ({3} * {0}).sum() * {1} ** 2",
    ),
    (
        *("dd", ["dd", "d"], "jax.lax.fori_loop(0, 3, lambda _, c: c * {1}, {0})"),
        "{3} * {1} ** 3, 3 * ({3} * {0}).sum(0) * {1} ** 2",
    ),
]
ROWS = {
    "None": None,
    "{Ldd}": "dd",
    "{dd}": "d",
    "jnp.arange(3)": "i",
    "jnp.swapaxes({bkd}, 0, 1)": "bd",
    "{Ldd}[:, 0]": "d",
}
SHAPES = {"dd": "4, 4", "d": "4", "s": "", "Ldd": "3, 4, 4"}
# How a value that nothing has read joins what the stage returns.
JOINS = {
    "bd": "{} + 0.5 * {}",
    "bkd": "{} + {}.sum(1)",
    "dd": "{} @ {}",
    "d": "{} + {}",
    "s": "{} * {}",
    "Ldd": "{} @ {}[1]",
}

Pool = dict[str, list[str]]  # names by kind


def write(seed: int) -> str:
    """The source of a stage: a class `Stage(normal)`, whose weights ``normal(*shape)`` makes."""
    w = _Writer(seed)
    weights = ["dd", *w.rng.sample(["dd", "d", "s", "Ldd", "d", "Ldd"], w.rng.randint(0, 3))]
    names = [w.new(kind) for kind in weights]
    pool: Pool = {"bd": ["bd0"]}
    lines = [f"{name} = self.{name}[...]" for name in names]
    for name, kind in zip(names, weights, strict=True):
        if name == names[0] or w.rng.random() < 0.92:  # else it is unused
            pool.setdefault(kind, []).append(name)
    lines += w.block(pool, w.rng.randint(3, 9), 0)
    out = w.pick(pool, "bd")
    for kind, text in JOINS.items():
        for name in [n for n in pool.get(kind, ()) if n not in w.used and w.rng.random() < 0.85]:
            new = w.new("bd")
            lines.append(f"{new} = {text.format(out, name)}")
            out = new
    lines.append("return " + w.rng.choice(["{}", "jnp.tanh({})", "{} + bd0"]).format(out))
    made = [
        f"        self.{name} = normal({SHAPES[kind]})"
        for name, kind in zip(names, weights, strict=True)
    ]
    head = ["class Stage(nnx.Module):", "    def __init__(self, normal):", *made, ""]
    return "\n".join([*head, "    def __call__(self, bd0):", *("        " + t for t in lines), ""])


class _Writer:
    """Writes one program."""

    def __init__(self, seed: int) -> None:
        self.rng, self.count = random.Random(seed), 0
        self.used: set[str] = set()

    def new(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def pick(self, pool: Pool, kind: str) -> str:
        """A value that there is, sooner one that nothing has read."""
        fresh = [name for name in pool[kind] if name not in self.used]
        some = fresh if fresh and self.rng.random() < 0.6 else pool[kind][-4:]
        name = self.rng.choice(some)
        self.used.add(name)
        return name

    def want(self, pool: Pool, kind: str, lines: list[str]) -> str:
        """A value of a kind, made if there is none."""
        if not pool.get(kind):
            name = self.new(kind)
            lines.append(f"{name} = {self.fill(self.rng.choice(_ready(pool, kind)), pool)}")
            pool.setdefault(kind, []).append(name)
        return self.pick(pool, kind)

    def fill(self, text: str, pool: Pool) -> str:
        return re.sub(r"\{(\w+)\}", lambda m: self.pick(pool, m[1]), text)

    def block(self, pool: Pool, count: int, depth: int) -> list[str]:
        """Lines of a body; what they make is in the pool."""
        lines: list[str] = []
        for _ in range(count):
            made: list[str] = []
            if self.rng.random() < (0.4, 0.2, 0.05, 0)[depth]:
                made = self.flow(pool, depth + 1, lines)
            else:
                kind = self.rng.choice([k for k in LIKELY if k in pool or k[0] != "b"])
                if ready := _ready(pool, kind):
                    made = [self.new(kind)]
                    lines.append(f"{made[0]} = {self.fill(self.rng.choice(ready), pool)}")
            for name in made:
                pool.setdefault(_kind(name), []).append(name)
        return lines

    def function(self, args, pool, results, depth, lines, returns=", ".join) -> str:
        """A nested function of args that gives results (kinds); its name."""
        name, inner = self.new("f"), {k: list(v) for k, v in pool.items()}
        for arg in args:
            inner.setdefault(_kind(arg), []).append(arg)
        body = self.block(inner, self.rng.randint(1, 2), depth)
        outs = []
        for kind in results:
            out = self.want(inner, kind, body)
            outs.append(f"jnp.tanh({out})" if self.rng.random() < 0.4 else out)
        lines += [f"def {name}({', '.join(args)}):", *("    " + t for t in body)]
        lines.append(f"    return {returns(outs)}")
        return name

    def flow(self, pool: Pool, depth: int, lines: list[str]) -> list[str]:
        """A loop, a branch or a call; the names it makes."""
        always = [self.scan] * 5 + [self.fori] * 2 + [self.branch] * 3 + [self.call] * 3
        always += [self.while_loop, self.over_matrices]
        on_batches = [self.over_rows] * 2 + [self.custom] * 3
        kinds = ["bd", "bd", "dd", "d"] if "bd" in pool else ["d", "d", "dd"]
        make = self.rng.choice(always + on_batches if "bd" in pool else always)
        return make(pool, depth, lines, kinds)

    def fori(self, pool, depth, lines, kinds):
        kind = self.rng.choice(kinds)
        arg, index, out = self.new(kind), self.new("i"), self.new(kind)
        init = self._start(self.want(pool, kind, lines))
        f = self.function([index, arg], pool, [kind], depth, lines)
        lines.append(f"{out} = jax.lax.fori_loop(0, 3, {f}, {init})")
        return [out]

    def branch(self, pool, depth, lines, kinds):
        kind, count = self.rng.choice(kinds), self.rng.choice([2, 2, 3])
        s, out, like = self.want(pool, "s", lines), self.new(kind), self.want(pool, kind, lines)
        given = self.pick(pool, kind) if self.rng.random() < 0.5 else None
        args = [self.new(kind)] if given else []
        functions = [self.function(args, pool, [kind], depth, lines) for _ in range(count)]
        if self.rng.random() < 0.15:
            functions[-1] = f"lambda *_: jnp.zeros_like({like})"
        index = f"jnp.clip(({s} * 4 + 1).astype(jnp.int32), 0, {count - 1})"
        operand = f", {given}" if given else ""
        lines.append(f"{out} = jax.lax.switch({index}, [{', '.join(functions)}]{operand})")
        return [out]

    def over_rows(self, pool, depth, lines, _):
        arg, out, x = self.new("d"), self.new("bd"), self.pick(pool, "bd")
        inner = {k: v for k, v in pool.items() if k[0] != "b" and k != "ib"}
        f = self.function([arg], inner, ["d"], depth, lines)
        lines.append(
            f"{out} = " + self.rng.choice([f"jax.vmap({f})({x})", f"jax.lax.map({f}, {x})"])
        )
        return [out]

    def over_matrices(self, pool, _, lines, __):
        out, x, w = self.new("Ldd"), self.want(pool, "Ldd", lines), self.want(pool, "dd", lines)
        lines.append(f"{out} = jax.lax.scan(lambda c, a: (jnp.tanh(c @ a), c), {w}, {x})[1]")
        return [out]

    def while_loop(self, pool, _, lines, kinds):
        kind = self.rng.choice(kinds)
        w, out, x = self.want(pool, "d", lines), self.new(kind), self.want(pool, kind, lines)
        lines.append(f"w{out}, x{out} = jax.lax.stop_gradient(({w}, {x}))")
        body = f"lambda c: (c[0] + 1, c[1] * w{out})"
        lines.append(f"{out} = jax.lax.while_loop(lambda c: c[0] < 2, {body}, (0, x{out}))[1]")
        return [out]

    def custom(self, pool, _, lines, __):
        by_jvp = self.rng.random() < 0.4
        kind, takes, body, back = self.rng.choice(CUSTOM[:4] if by_jvp else CUSTOM)
        f, out = self.new("f"), self.new(kind)
        args = [self.want(pool, k, lines) for k in takes]
        a, b = self.new(takes[0]), self.new(takes[1])
        body = body.format(a, b)
        lines.append(f"@jax.custom_{'jvp' if by_jvp else 'vjp'}")
        lines += [f"def {f}({a}, {b}):", f"    return {body}"]
        if by_jvp:
            rule = f"jax.jvp(lambda {a}, {b}: {body}, p, (t[0], 2 * t[1]))"
            lines.append(f"{f}.defjvp(lambda p, t: {rule})")
        else:
            back = back.format("r[0]", "r[1]", "r[2]", "g")
            forward = f"lambda a, b: ({f}(a, b), (a, b, {f}(a, b)))"
            lines.append(f"{f}.defvjp({forward}, lambda r, g: ({back}))")
        lines.append(f"{out} = {f}({args[0]}, {args[1]})")
        return [out]

    def call(self, pool, depth, lines, kinds):
        takes = [k for k in (*kinds, "dd", "Ldd") if pool.get(k)]
        takes = self.rng.sample(takes, min(len(takes), self.rng.randint(1, 2)))
        args, given = [self.new(k) for k in takes], [self.pick(pool, k) for k in takes]
        results = [self.rng.choice(kinds) for _ in range(self.rng.randint(1, 2))]
        f = self.function(args, pool, results, depth, lines)
        outs = [self.new(k) for k in results]
        wrapped = f"jax.checkpoint({f}{self.rng.choice(POLICIES)})"
        called = self.rng.choice([f"jax.jit({f})", wrapped, wrapped])
        lines.append(f"{', '.join(outs)} = {called}({', '.join(given)})")
        return outs

    def scan(self, pool, depth, lines, kinds):
        carry = [self.rng.choice([*kinds, "s"]) for _ in range(self.rng.randint(1, 2))]
        inits = [self.want(pool, k, lines) for k in carry]
        xs = self.rng.choice([t for t in ROWS if all(pool.get(k) for k in _needs(t))])
        args, rows = [self.new(k) for k in carry], ROWS[xs]
        row = self.new(rows) if rows else "_"
        ys = self.rng.choice([None, *kinds, "dd"])

        def returns(outs: list[str]) -> str:
            passed = [
                a if self.rng.random() < 0.12 else o for a, o in zip(args, outs, strict=False)
            ]
            return f"({', '.join(passed)},), {outs[-1] if ys else None}"

        results = [*carry, *([ys] if ys else [])]
        given = [*args, *([row] if rows else [])]
        f = self.function(given, pool, results, depth, lines, returns)
        at = max(n for n, text in enumerate(lines) if text.startswith(f"def {f}("))
        lines[at : at + 1] = [f"def {f}(carry, {row}):", f"    {', '.join(args)}, = carry"]
        init = ", ".join(map(self._start, inits))
        more = self.rng.choice(["", "", "", ", reverse=True", ", unroll=2", ", unroll=True"])
        length = ", length=3" if xs == "None" else ""
        outs, found = [self.new(k) for k in carry], self.new("y")
        call = f"jax.lax.scan({f}, ({init},), {self.fill(xs, pool)}{length}{more})"
        lines.append(f"({', '.join(outs)},), {found} = {call}")
        if ys:
            kind, text = _stacked(ys, four=xs == "{dd}")
            outs.append(self.new(kind))
            lines.append(f"{outs[-1]} = {text.format(found)}")
        return outs

    def _start(self, value: str) -> str:
        """The start of a loop: often a fresh array of zeros."""
        return f"jnp.zeros_like({value})" if self.rng.random() < 0.2 else value


def _stacked(kind: str, *, four: bool) -> tuple[str, str]:
    """Kind and use of the rows that a scan of three or four trips has made."""
    found = {"dd": ("Ldd", "{}"), "d": ("d", "{}.sum(0)"), "bd": ("bkd", "jnp.swapaxes({}, 0, 1)")}
    of_four = {"dd": ("dd", "{}.sum(0)"), "bd": ("bd", "{}.mean(0)")}
    return (found | of_four if four else found)[kind]


def _needs(text: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", text)


def _ready(pool: Pool, kind: str) -> list[str]:
    return [text for text in EXPRESSIONS[kind] if all(pool.get(k) for k in _needs(text))]


def _kind(name: str) -> str:
    return name.rstrip("0123456789")
