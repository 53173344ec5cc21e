"""Speculative execution of two functions: exact for categories, by statistics for densities.

*Enumeration*: every guess of every context, through the very functions that a round calls, gives
g's joint distribution over three rounds to 1e-6.

*Statistics*: whatever the past, the number F(x) is uniform, where F is the distribution function of
g's next value x given the values before it; and such numbers of different steps are independent. So
the joint counts of three steps, each cut in four, are tested against equal probabilities. Seeds are
fixed; by chance one of 10^6 choices of them would fail. Wrong rules must fail the same test.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import struct

import jspec
from jspec.lab.analysis.goodness import goodness_of_fit
from jspec.speculation import functions
from jspec.speculation.acceptance import chain, rejection
from jspec.speculation.distributions import (
    Categorical,
    Gaussian,
    draw,
    draw_after,
    log_prob,
)
from jspec.speculation.functions import RULES, Rule, judge_by_ratio, judge_categories
from tests.cases import slow_unless
from tests.speculation.enumeration import Paths, worst_error_of
from tests.speculation.toys import make_tables

VOCAB = 4
TARGET, DRAFT = make_tables(seed=1, vocab=VOCAB)
KEY = jax.random.key(7)
TOLERANCE, VISIBLE = 1e-6, 1e-3
FALSE_ALARM = 1e-6
NUM_CHAINS, NUM_STEPS, NUM_DRAFTS = 8_000, 3, 2


def category_f(state):
    return Categorical(DRAFT[state[0], state[1]])


def category_g(state):
    return Categorical(TARGET[state[0], state[1]])


def shift(state, value):
    """Keeps the last two values."""
    return jnp.stack([state[1], value])


START = jnp.array([0, 1], jnp.int32)
NUM_VALUES = 18


# Enumeration.


@functools.cache
def paths_of_round(width):
    """Returns what one round makes of every context and every path of guesses."""
    contexts = list(itertools.product(range(VOCAB), repeat=2))
    guesses = list(itertools.product(range(VOCAB), repeat=width))
    chains = np.array([[*context, *path] for context in contexts for path in guesses], np.int32)

    @jax.jit
    @jax.vmap
    def one_round(chain):
        forced = functions.guess(category_f, shift, chain[:2], lambda _, value: value, chain[2:])
        targets = functions.side_by_side(category_g)(forced.states)
        return functions.as_proposal(targets, forced.drafts, forced.values)

    target_probs, proposal = jax.tree.map(lambda leaf: leaf[:, 0], one_round(chains))
    drawn = np.take_along_axis(np.asarray(proposal.probs, np.float64), chains[:, 2:, None], axis=2)
    index = np.repeat(np.arange(len(contexts)), len(guesses))
    weights = np.prod(drawn[..., 0], axis=1)
    return Paths(contexts, index, chains, weights, target_probs, proposal)


def enumerated_error(rule, width):
    """Returns how far the joint distribution of three rounds is from g's, at most."""
    probs = jax.vmap(jax.vmap(lambda logits: Categorical(logits).probs))(TARGET)
    return worst_error_of(rule, np.asarray(probs, np.float64), paths_of_round(width))


@pytest.mark.parametrize("width", [1, 3])
def test_categories_are_exact(width):
    """Guards against a bias in any of three rounds, in what a round tells the rule, too."""
    assert enumerated_error(rejection.RULE, width) < TOLERANCE


def not_normalised(target_probs, proposal, num_accepted):
    """The residual without its normaliser."""
    target = chain.probs_after(target_probs, num_accepted)
    draft = chain.draft_distribution_after(proposal, num_accepted, VOCAB)
    return jnp.maximum(target - draft, 0.0)


def guess_again(target_probs, proposal, num_accepted):
    """After a rejection f's own distribution."""
    target = chain.probs_after(target_probs, num_accepted)
    draft = chain.draft_distribution_after(proposal, num_accepted, VOCAB)
    return jnp.where((num_accepted < proposal.num_tokens)[:, None], draft, target)


def swapped(target_probs, proposal):
    """Accepts with min(1, draft / target)."""
    draft = chain.draft_probs_of_drafts(proposal)
    return chain.min_ratio(draft, chain.probs_of_drafts(target_probs, proposal))


@pytest.mark.parametrize(
    "change",
    [{"next_token_probs": guess_again}, {"acceptance_probs": swapped}],
    ids=["guess again", "swapped"],
)
def test_wrong_rules_for_categories_are_caught(change):
    """Negative controls of the enumeration."""
    assert enumerated_error(rejection.RULE._replace(**change), 2) > VISIBLE


def test_a_residual_that_is_not_normalised_is_caught():
    """Negative control: the probabilities of what a round emits do not even add up."""
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        enumerated_error(rejection.RULE._replace(next_token_probs=not_normalised), 2)


# Statistics.


class Laplace(struct.PyTreeNode):
    """A density that the library does not know, in the form of numpyro's: `sample(key, shape)`."""

    mean: jax.Array
    scale: float = 1.0

    def sample(self, key, sample_shape=()):
        return self.mean + self.scale * jax.random.laplace(key, sample_shape)

    def log_prob(self, value):
        return -jnp.abs(value - self.mean) / self.scale - jnp.log(2 * self.scale)


class Seeded(Gaussian):
    """A Gaussian in the form of distrax', `sample(*, seed)`, which no formula knows."""

    def sample(self, *, seed, sample_shape=()):
        del sample_shape
        return Gaussian.sample(self, seed)


def center(x):
    return jnp.sin(2 * x)


class Case(NamedTuple):
    """Two functions of the last value, and g's distribution function: (values, past) -> [0, 1]."""

    f: object
    g: object
    cdf: object
    shape: tuple = ()


def normal_cdf(scale):
    return lambda x, past: scipy.stats.norm.cdf(x, np.sin(2 * past), scale)


SCALES = np.array([0.5, 2.0], np.float32)
CASES = {
    "same scales": Case(
        lambda x: Gaussian(0.9 * x, 1.0), lambda x: Gaussian(center(x), 1.0), normal_cdf(1.0)
    ),
    "two numbers": Case(
        lambda x: Gaussian(0.5 * x, SCALES), lambda x: Gaussian(center(x), SCALES),
        normal_cdf(SCALES), (2,),
    ),
    "other scales": Case(
        lambda x: Gaussian(0.9 * x, 1.5), lambda x: Gaussian(center(x), 1.0), normal_cdf(1.0)
    ),
    "narrow guesses": Case(
        lambda x: Gaussian(0.9 * x, 0.5), lambda x: Gaussian(center(x), 1.0), normal_cdf(1.0)
    ),
    "other families": Case(
        lambda x: Seeded(0.9 * x, 1.5), lambda x: Laplace(center(x)),
        lambda x, past: scipy.stats.laplace.cdf(x, np.sin(2 * past)),
    ),
}  # fmt: skip


def p_value(case, rule, num_drafts=NUM_DRAFTS):
    """Returns the p-value of the joint counts of the chains' first values."""
    start = jnp.zeros(case.shape, jnp.float32)
    f, g, update = map(jax.tree_util.Partial, (case.f, case.g, functions.latest))

    @jax.jit
    @jax.vmap
    def run(key):
        return functions.run_rounds(
            f, g, update, start, key, num_steps=NUM_STEPS, num_drafts=num_drafts, rule=rule
        )[0]  # fmt: skip

    chains = run(jax.random.split(KEY, NUM_CHAINS))
    assert 0 < chains.num_accepted.sum() < chains.num_proposed.sum() or num_drafts == 0
    values = np.asarray(chains.values, np.float64)
    past = np.concatenate([np.zeros_like(values[:, :1]), values[:, :-1]], axis=1)
    uniforms = case.cdf(values, past).reshape(NUM_CHAINS, -1)
    cuts = 4 if uniforms.shape[1] == NUM_STEPS else 2
    cells = np.minimum((uniforms * cuts).astype(int), cuts - 1)
    counts = np.zeros([cuts] * uniforms.shape[1])
    np.add.at(counts, tuple(cells.T), 1)
    return goodness_of_fit(counts, np.full_like(counts, 1 / counts.size)).p_value


@pytest.mark.parametrize(
    "name", [slow_unless(name in ("same scales", "other families"), name) for name in CASES]
)
def test_densities_follow_g(name):
    """Guards against a residual that is not target - min(target, draft), in any of three rounds."""
    assert p_value(CASES[name], RULES["rejection"]) > FALSE_ALARM


def from_target(target, draft, value, is_rejected, rng_key):
    """No residual."""
    return draw(target, rng_key)


def reflected_anyway(target, draft, value, is_rejected, rng_key):
    """Reflects whatever the scales."""
    same = Gaussian(target.mean, draft.scale)
    return draw_after(same, draft, value, is_rejected, rng_key)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("same scales", from_target),
        ("other families", from_target),
        slow_unless(False, "other scales", reflected_anyway),
    ],
)
def test_wrong_rules_for_densities_are_caught(name, after):
    """Negative controls: the mistakes that the formulas invite."""
    wrong = Rule(functools.partial(judge_by_ratio, after=after), False)
    assert p_value(CASES[name], wrong) < FALSE_ALARM


def test_the_program_draws_categories_as_enumerated():
    """Guards against noise that is used twice, which no enumeration sees; and its own control."""

    def fit(judge):
        run = functools.partial(
            functions.run_rounds, *map(jax.tree_util.Partial, (category_f, category_g, shift)),
            START, num_steps=NUM_STEPS, num_drafts=NUM_DRAFTS, rule=Rule(judge, False),
        )  # fmt: skip
        values = jax.jit(jax.vmap(lambda key: run(key)[0].values))(
            jax.random.split(KEY, NUM_CHAINS)
        )
        counts = np.zeros([VOCAB] * NUM_STEPS)
        np.add.at(counts, tuple(np.asarray(values).T), 1)
        probs = np.asarray(jax.nn.softmax(TARGET), np.float64)
        joint = np.einsum("a,ab,abc->abc", probs[0, 1], probs[1], probs)
        return goodness_of_fit(counts, joint / joint.sum()).p_value

    assert fit(functions.judge) > FALSE_ALARM
    broken = rejection.RULE._replace(
        accept=lambda target_probs, proposal, noise: rejection.accept(
            target_probs, proposal, noise, lenience=0.5
        )
    )
    assert fit(functools.partial(judge_categories, rule=broken)) < FALSE_ALARM


def test_the_loop_of_draws_is_short_on_average():
    """One draw for each guess examined, however alike the two are: 1 / TV draws with odds of TV."""
    count = []

    class Counted(Laplace):
        def sample(self, key, sample_shape=()):
            jax.debug.callback(lambda: count.append(1))
            return Laplace.sample(self, key, sample_shape)

    distance = 0.02
    target, draft = Counted(jnp.float32(0)), Laplace(jnp.float32(distance))
    variation = 1 - np.exp(-distance / 2)
    value = jnp.float32(0.5)
    run = jax.jit(lambda key: draw_after(target, draft, value, jnp.bool_(True), key))
    for seed in range(20):
        run(jax.random.key(seed)).block_until_ready()
    jax.effects_barrier()
    assert 0.3 / variation < len(count) / 20 < 3 / variation


# Paths.


def plain_chain(g, update, state, key, num_steps):
    """Returns g's own chain, a plain loop in Python with the key of each step, folded here."""
    chain_key = jax.random.wrap_key_data(jax.random.bits(key, [2], jnp.uint32), impl="threefry2x32")

    @jax.jit
    def once(state, step):
        step_key = functools.reduce(jax.random.fold_in, (0, step, 0), chain_key)
        return draw(g(state), step_key)

    values = []
    for step in range(num_steps):
        values.append(once(state, step))
        state = update(state, values[-1])
    return np.array(values), state


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_coupled_values_are_those_of_g_alone(num_drafts):
    """Guards against noise that depends on the round, and against a state of a rejected guess."""
    chain = run(num_drafts=num_drafts, acceptance="coupled")
    values, state = plain_chain(category_g, shift, START, KEY, NUM_VALUES)
    np.testing.assert_array_equal(chain.values, values)
    np.testing.assert_array_equal(chain.state, state)
    assert (chain.num_rounds < NUM_VALUES) == (num_drafts > 0)


def test_coupled_densities_are_those_of_g_alone():
    """Where no guess can be right, each round still gives g's own value."""
    case = CASES["same scales"]
    chain = jspec.speculate(
        case.f, case.g, 1.0, KEY, num_steps=5, num_drafts=2, acceptance="coupled"
    )
    values, _ = plain_chain(case.g, functions.latest, jnp.float32(1), KEY, 5)
    np.testing.assert_allclose(chain.values, values, rtol=1e-6)
    assert int(chain.num_rounds) == 5


def run(f=category_f, g=category_g, state=START, key=KEY, **options):
    """Runs a chain of categories; equal programs are shared by the tests."""
    options = {"num_steps": NUM_VALUES, "num_drafts": 3, "update": shift} | options
    return jspec.speculate(f, g, state, key, **options)


@pytest.mark.parametrize("rule", RULES)
def test_seeds_and_counts(rule):
    """The same key gives the same chain, and the counts add up."""
    chains = [run(key=jax.random.key(seed), acceptance=rule) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(chains[0].values, chains[1].values)
    assert (chains[0].values != chains[2].values).any()
    for result in chains:
        # Each round but perhaps the last ends with a value that is no guess.
        ends = int((~result.is_guess).sum()) + bool(result.is_guess[-1])
        assert int(result.num_rounds) == ends
        assert int(result.num_values) == NUM_VALUES
        assert 3 * (ends - 1) < int(result.num_proposed) <= 3 * ends
        np.testing.assert_array_equal(result.state, result.values[-2:])


def test_g_guessing_for_itself_keeps_all():
    """Guards against an epsilon; guesses past the last step count neither way."""
    chain = run(f=category_g)
    assert int(chain.num_rounds) == -(-NUM_VALUES // 4)
    num_guesses = NUM_VALUES - NUM_VALUES // 4
    assert int(chain.num_proposed) == int(chain.num_accepted) == num_guesses


def test_parameters_are_arguments():
    """Other parameters in a `Partial` compile nothing; a state may hold keys and numbers."""

    def g(params, state):
        return Categorical(params[state["last"]])

    def update(state, value):
        return {**state, "last": value, "count": state["count"] + 1}

    state = {"last": 0, "count": 0, "key": jax.random.key(3)}
    options = {"num_steps": 6, "num_drafts": 2, "update": update}
    sizes = []
    for seed in range(2):
        table = jax.random.normal(jax.random.key(seed), [VOCAB, VOCAB])
        partial = jax.tree_util.Partial(g, table)
        chain = jspec.speculate(partial, partial, state, KEY, **options)
        sizes.append(functions.run_rounds._cache_size())
    assert sizes[0] == sizes[1]
    assert int(chain.state["count"]) == 6


def test_no_guess_of_density_zero_is_kept():
    """Not even where the uniform is 0."""

    class Step(struct.PyTreeNode):
        """Uniform on [0, width)."""

        width: jax.Array

        def sample(self, rng_key):
            return self.width * jax.random.uniform(rng_key, [], jnp.float32)

        def log_prob(self, value):
            is_inside = (value >= 0) & (value < self.width)
            return jnp.where(is_inside, -jnp.log(self.width), -jnp.inf)

    keys = functions.round_keys(jax.random.key(0), jnp.int32(0), 1, False)
    targets, drafts = Step(jnp.array([1.0, 1.0])), Step(jnp.array([4.0]))
    original = jax.random.uniform
    try:
        jax.random.uniform = lambda key, *args: jnp.zeros_like(original(key, *args))
        judge = functools.partial(judge_by_ratio, after=lambda *operands: operands[2])
        num_accepted, _ = jax.jit(judge)(targets, drafts, jnp.array([2.0]), keys)
    finally:
        jax.random.uniform = original
    assert int(num_accepted) == 0


class Coin(struct.PyTreeNode):
    """1 with a probability, else -1; weakly typed, as numbers of Python are."""

    chance: jax.Array

    def sample(self, rng_key):
        return jnp.where(jax.random.uniform(rng_key) < self.chance, 1.0, -1.0)

    def log_prob(self, value):
        return jnp.log(jnp.where(value > 0, self.chance, 1 - self.chance))


class TypedCoin(Coin):
    """The same, in float32."""

    def sample(self, rng_key):
        return Coin.sample(self, rng_key).astype(jnp.float32)


@pytest.mark.parametrize("acceptance", [slow_unless(name == "rejection", name) for name in RULES])
def test_weakly_typed_values_are_of_their_type(acceptance):
    """They were refused beside others, in a message that named the same type twice."""
    chains = [
        jspec.speculate(
            lambda x: TypedCoin(0.5 + 0.2 * x), lambda x, kind=kind: kind(0.5 + 0.3 * x),
            jnp.float32(1), KEY, num_steps=20, num_drafts=3, acceptance=acceptance,
        )
        for kind in (Coin, TypedCoin)
    ]  # fmt: skip
    assert 0 < int(chains[0].num_accepted) < 20
    np.testing.assert_array_equal(chains[0].values, chains[1].values)


class Interval(NamedTuple):
    """A support in the form of numpyro's."""

    width: jax.Array

    def __call__(self, value):
        return (value >= 0) & (value < self.width)


class Uniform(struct.PyTreeNode):
    """Uniform on [0, width) in the form of numpyro's, whose density is the same everywhere."""

    width: jax.Array

    @property
    def support(self):
        return Interval(self.width)

    def sample(self, rng_key):
        return self.width * jax.random.uniform(rng_key, [], jnp.float32)

    def log_prob(self, value):
        return jnp.broadcast_to(-jnp.log(self.width), jnp.shape(value))


def test_supports_that_follow_from_the_state_are_heeded():
    """No guess outside g's is kept, and no value outside f's is missing."""
    steps = [jax.tree_util.Partial(lambda end, x: Uniform(end + 0 * x), end) for end in (4.0, 2.0)]
    for f, g, wide in ((*steps, 2.0), (*steps[::-1], 4.0)):
        chain = jspec.speculate(f, g, jnp.float32(0), KEY, num_steps=400, num_drafts=3)
        assert 0.95 * wide < float(chain.values.max()) < wide
        # 8 standard deviations of the mean of 400 values.
        assert abs(float(chain.values.mean()) - wide / 2) < 8 * wide / 12**0.5 / 20


class WithEnds(Laplace):
    """A density with a method of that name, as scipy's have."""

    def support(self):
        return -jnp.inf, jnp.inf


def test_a_method_named_support_is_not_called():
    """Nobody knows what it takes."""
    step = WithEnds(jnp.float32(1))
    assert float(log_prob(step, jnp.float32(2))) == float(step.log_prob(2.0))


# Bad input.


def nan_at(function, last):
    """Returns the function, but its logits are NaN after that category."""

    def changed(state):
        return Categorical(jnp.where(state[1] == last, jnp.nan, function(state).logits))

    return changed


NAN_G = nan_at(category_g, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_steps": 0}, "expected num_steps from 1"),
        ({"num_drafts": -1}, "expected num_drafts from 0"),
        ({"acceptance": "block"}, "expected acceptance among rejection, coupled; got 'block'"),
        ({"f": lambda state: Categorical(jnp.zeros(3))}, "Categorical of int32[], 3 categories, g"),
        ({"f": lambda state: Gaussian(0.0, 1.0)}, "f gives Gaussian of float32[], g gives Categ"),
        ({"f": lambda state: 3}, "expected f to give a distribution with sample and log_prob"),
        ({"g": lambda state: jnp.zeros(4)}, "log_prob, got an array, float32[4]"),
        ({"key": jax.random.split(KEY)}, "expected rng_key to be one key, such as"),
        ({"f": lambda state: Laplace(jnp.zeros(3))}, "log_prob of f to be one number"),
        ({"update": lambda state, value: value}, "expected update to give int32[2]"),
        ({"update": lambda state, value: (state, value)}, "to give a state of the form"),
        slow_unless(
            False,
            {"f": nan_at(category_f, 3)},
            "expected log_prob to be a number; that of f is NaN at",
        ),
        ({"g": NAN_G}, "expected log_prob to be a number; that of g is NaN at"),
        ({"g": lambda state: category_g(state) if state[0] > 1 else None}, "expected g to be jax"),
        ({"f": lambda state: Categorical(np.ones(4) * int(state[0]))}, "expected f to be jax.nump"),
        ({"f": lambda state: Categorical(np.sin(state))}, "on traced arrays, such as jnp.where"),
        ({"update": lambda state, value: shift(state, int(value))}, "expected update to be jax.n"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_bad_input_is_one_line(options, message):
    """Each says what was expected and what came."""
    with pytest.raises(ValueError, match="expected") as caught:
        run(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scale", "name"),
    [
        (-1.0, "f"),
        slow_unless(False, 0.0, "g"),
        slow_unless(False, np.array([1.0, -1.0], np.float32), "[fg]"),
    ],
)
def test_a_gaussian_needs_scales_above_zero(scale, name):
    """A negative one was the reflected Gaussian, whose density is that of its absolute value."""
    wrong, right = (lambda x, scale=scale: Gaussian(x, scale) for scale in (scale, 1.0))
    f, g = (wrong if part in name else right for part in "fg")
    start = jnp.zeros(np.shape(scale), jnp.float32)
    with pytest.raises(ValueError, match=rf"that of {name} is NaN at step 0 \(for a Gaussian"):
        jspec.speculate(f, g, start, KEY, num_steps=3, num_drafts=1)


def test_nan_within_jit_is_told_by_the_number_of_values():
    """A jitted caller cannot be raised to: the values before the fault are those that count."""
    chain = jax.jit(lambda: run(g=NAN_G, acceptance="coupled"))()
    values, _ = plain_chain(category_g, shift, START, KEY, NUM_VALUES)
    first = values.tolist().index(3) + 1
    assert int(chain.num_values) == first
    np.testing.assert_array_equal(chain.values[:first], values[:first])
