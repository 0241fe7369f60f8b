"""Answers that a weight update cuts go on with the new weights, and are labelled with what sampled them."""

import asyncio
import copy
import itertools
import pickle
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_drmas.rollout import resuming
from verl_drmas.rollout.resuming import ResumingClient
from verl_drmas.workflows import SessionFailed

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
PARAMS = {"temperature": 1.0, "seed": 11, "max_tokens": 8, "logprobs": True}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(resuming, "PAUSE", 0.0)


class Handle:
    """An actor handle: every method has `.remote`, which returns an awaitable."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        method = getattr(self._target, name)

        def remote(*args, **kwargs):
            async def call():
                result = method(*args, **kwargs)
                return await result if asyncio.iscoroutine(result) else result

            return asyncio.ensure_future(call())

        return SimpleNamespace(remote=remote)


class Server:
    """Says one piece after another: (tokens, version) is cut, (tokens, version, "completed") is not."""

    def __init__(self, *pieces, name="one"):
        self.name, self.pieces, self.asked, self.aborted = name, list(pieces), [], []

    async def generate(self, **request):
        self.asked.append(copy.deepcopy(request))
        piece = self.pieces.pop(0)
        if isinstance(piece, Exception):
            raise piece
        if piece == "for ever":
            await asyncio.sleep(600)
        tokens, version, *end = piece
        return TokenOutput(
            token_ids=list(tokens),
            log_probs=[-t / 10 for t in tokens] if tokens else None,
            stop_reason=end[0] if end else "aborted",
            num_preempted=1,
            extra_fields={"global_steps": version, "num_cached_tokens": 10 * version if version else None},
        )

    def abort_request(self, request_id, reset_prefix_cache=True):
        self.aborted.append((request_id, reset_prefix_cache))


class Pool:
    def __init__(self, *servers):
        self.servers = servers
        self.balancer = GlobalRequestLoadBalancer({s.name: Handle(s) for s in servers})
        for rank, server in enumerate(servers):
            self.balancer._inflight_requests[server.name] = rank
        self.client = ResumingClient(CONFIG, Handle(self.balancer))

    def generate(self, params=PARAMS, prompt=(100, 101)):
        async def call():
            output = await self.client.generate("r", prompt_ids=list(prompt), sampling_params=params)
            await asyncio.sleep(0)
            return output

        return asyncio.run(asyncio.wait_for(call(), 60))


def versions(output):
    fields = output.extra_fields
    assert fields["global_steps"] == fields["max_global_steps"]
    return fields["min_global_steps"], fields["max_global_steps"]


def test_an_answer_that_nothing_cuts_is_one_call():
    server = Server(([1, 2], 3, "completed"))
    pool = Pool(server)
    output = pool.generate()
    assert (output.token_ids, output.log_probs, output.stop_reason) == ([1, 2], [-0.1, -0.2], "completed")
    assert versions(output) == (3, 3)
    assert output.extra_fields["num_cached_tokens"] == 30 and output.num_preempted == 1
    (asked,) = server.asked
    assert asked["prompt_ids"] == [100, 101] and asked["sampling_params"] == PARAMS


@pytest.mark.parametrize("word", ["aborted", "abort"])
def test_an_answer_that_is_cut_goes_on_behind_what_is_there(word):
    server = Server(([1, 2], 3, word), ([4], 4, word), ([5, 6], 5, "completed"))
    pool = Pool(server)
    output = pool.generate()
    assert output.token_ids == [1, 2, 4, 5, 6]
    assert output.log_probs == [-0.1, -0.2, -0.4, -0.5, -0.6]
    assert output.stop_reason == "completed"
    assert versions(output) == (3, 5)
    assert [a["prompt_ids"] for a in server.asked] == [[100, 101], [100, 101, 1, 2], [100, 101, 1, 2, 4]]
    assert [a["sampling_params"]["max_tokens"] for a in server.asked] == [8, 6, 5]
    assert output.num_preempted == 3 and output.extra_fields["num_cached_tokens"] == 30  # the first prompt's
    assert pool.client.retried == 0  # an update is no fault


EMPTY = {
    "before the first token": ([([], 3), ([1], 4, "completed")], (4, 4)),
    "twice before the first token": ([([], 3), ([], 4), ([1], 5, "completed")], (5, 5)),
    "after the last token": ([([1], 3), ([], 4, "completed")], (3, 3)),
    "in between": ([([1], 3), ([], 4), ([2], 5, "completed")], (3, 5)),
    "nothing at all": ([([], 3), ([], 4, "completed")], (4, 4)),
    "weights that went back": ([([1], 5), ([2], 3, "completed")], (3, 5)),
}


@pytest.mark.parametrize(("pieces", "label"), EMPTY.values(), ids=EMPTY)
def test_only_pieces_with_tokens_are_in_the_label(pieces, label):
    assert versions(Pool(Server(*pieces)).generate()) == label


@pytest.mark.parametrize("cuts", list(itertools.product([0, 1, 2], repeat=3)))
def test_the_label_is_what_sampled_the_tokens_wherever_the_cuts_are(cuts):
    """A token's value is the version that sampled it, so that the label can be checked against the tokens."""
    pieces = [([version] * n, version) for version, n in enumerate(cuts, start=1)]
    output = Pool(Server(*pieces, ([4] * (8 - sum(cuts)), 4, "completed"))).generate()
    assert len(output.token_ids) == 8
    assert versions(output) == (min(output.token_ids), max(output.token_ids))


def test_a_cut_at_the_last_token_is_the_end():
    server = Server(([1] * 5, 3), ([2] * 3, 4))
    output = Pool(server).generate()
    assert output.token_ids == [1] * 5 + [2] * 3
    assert output.stop_reason == "completed" and len(server.asked) == 2


def test_a_piece_draws_its_own_random_numbers_and_the_same_in_every_run():
    runs = []
    for _ in range(2):
        server = Server(([1, 2], 3), ([3], 4), ([], 5), ([5], 6, "completed"))
        Pool(server).generate()
        runs.append([a["sampling_params"]["seed"] for a in server.asked])
    assert runs[0] == runs[1]
    first, second, third, again = runs[0]
    assert first == PARAMS["seed"] and len({first, second, third}) == 3
    assert third == again  # nothing was drawn in between
    assert all(0 <= seed < 2**31 for seed in runs[0])


def test_without_a_seed_none_is_made():
    server = Server(([1], 3), ([2], 4, "completed"))
    Pool(server).generate({"max_tokens": 4})
    assert server.asked[1]["sampling_params"] == {"max_tokens": 3}


def test_a_least_number_of_tokens_is_of_all_pieces():
    server = Server(([1, 2], 3), ([3, 4], 4), ([5], 5, "completed"))
    Pool(server).generate({"max_tokens": 8, "min_tokens": 3})
    assert [a["sampling_params"]["min_tokens"] for a in server.asked] == [3, 1, 0]


def test_log_probs_that_are_missing_in_one_piece_are_missing_in_all():
    class Mute(Server):
        async def generate(self, **request):
            output = await super().generate(**request)
            if len(self.asked) == 2:
                output.log_probs = None
            return output

    assert Pool(Mute(([1], 3), ([2], 4, "completed"))).generate().log_probs is None


def test_an_engine_without_versions_labels_nothing():
    assert versions(Pool(Server(([1], None), ([2], 4, "completed"))).generate()) == (None, None)


def test_the_callers_parameters_are_never_changed():
    params = dict(PARAMS)
    Pool(Server(([1], 3), ([2], 4, "completed"))).generate(params)
    assert params == PARAMS


def test_a_server_that_dies_between_pieces_costs_a_retry_and_nothing_else():
    dying = Server(([1, 2], 3), ActorDiedError(), name="dying")
    pool = Pool(dying, Server(([3], 4, "completed"), name="alive"))
    output = pool.generate()
    assert output.token_ids == [1, 2, 3] and versions(output) == (3, 4)
    assert pool.client.retried == 1
    assert pool.servers[1].asked[0]["prompt_ids"] == [100, 101, 1, 2]


def test_no_server_left_fails_as_ever():
    with pytest.raises(SessionFailed) as failed:
        Pool(Server(([1], 3), ActorDiedError())).generate()
    assert failed.value.reason == "server"


def test_a_call_that_is_cancelled_ends_in_the_engine_too():
    server = Server(([1], 3), "for ever")
    pool = Pool(server)

    async def call():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pool.client.generate("r", prompt_ids=[1], sampling_params=PARAMS), 0.5)
        await asyncio.sleep(0)

    asyncio.run(call())
    assert server.aborted == [(server.asked[1]["request_id"], False)]  # and others keep their prefix cache
    assert pool.client._running == pool.client._asked == {}
    assert pool.balancer.get_inflight_count("one") == 0


def test_a_server_that_cannot_abort_is_no_matter():
    class Old:
        name = "one"

        async def generate(self, **request):
            await asyncio.sleep(600)

    pool = Pool(Old())

    async def call():
        await asyncio.wait_for(pool.client.generate("r", prompt_ids=[1], sampling_params=PARAMS), 0.3)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(call())


def test_nothing_is_kept_and_it_survives_pickling():
    pool = Pool(Server(([1], 3), ([2], 4, "completed")))
    pool.generate()
    assert pool.client._running == pool.client._asked == {}
    assert pool.balancer.get_inflight_count("one") == 0
    again = pickle.loads(pickle.dumps(ResumingClient(CONFIG, None)))
    assert again.config == CONFIG and again.retried == 0
