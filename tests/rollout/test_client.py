"""Calls to LLM servers that die: out of the balancer, asked once more with the same seed, counted."""

import asyncio
import copy
import pickle
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_drmas.rollout.client import RetryingClient, TeamClient, is_dead
from verl_drmas.workflows import SessionFailed

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}})
PARAMS = {"temperature": 1.0, "seed": 11, "max_tokens": 4}


class EngineDeadError(Exception):
    """Named as vLLM's."""


class EngineGenerateError(Exception):
    """Named as vLLM's, which it calls recoverable."""


def from_server(cause):
    """The error as Ray hands it to the caller."""
    return RayTaskError("generate", "traceback", cause)


class Handle:
    """An actor handle: every method has `.remote`, which returns an awaitable."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        def remote(*args, **kwargs):
            done = asyncio.get_running_loop().create_future()
            try:
                done.set_result(getattr(self._target, name)(*args, **kwargs))
            except Exception as error:  # noqa: BLE001  the caller gets it, as from Ray
                done.set_exception(error)
            return done

        return SimpleNamespace(remote=remote)


class Server:
    def __init__(self, name, error=None, stop_reason="completed"):
        self.name, self.error, self.stop_reason, self.asked = name, error, stop_reason, []

    def generate(self, **request):
        self.asked.append(copy.deepcopy(request))
        request["sampling_params"].pop("max_tokens")  # verl's vLLM server does
        if self.error is not None:
            raise self.error
        return TokenOutput(token_ids=[1, 2], log_probs=[-0.1, -0.2], stop_reason=self.stop_reason, extra_fields={})


class Pool:
    """verl's own balancer over fake servers; the first of the list is drawn first."""

    def __init__(self, *servers):
        self.servers = servers
        self.balancer = GlobalRequestLoadBalancer({s.name: Handle(s) for s in servers})
        for rank, server in enumerate(servers):
            self.balancer._inflight_requests[server.name] = rank
        self.client = RetryingClient(CONFIG, Handle(self.balancer))

    def generate(self, params=PARAMS):
        async def call():
            output = await self.client.generate("r", prompt_ids=[1], sampling_params=params)
            await asyncio.sleep(0)
            return output

        return asyncio.run(call())


DEATHS = {
    "the actor died": ActorDiedError(),
    "the actor died, said by another actor": from_server(ActorDiedError()),
    "the engine died in a living actor": from_server(EngineDeadError()),
    "the engine died two actors away": from_server(from_server(EngineDeadError())),
    "some other actor error": RayActorError(),
}


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS)
def test_a_call_to_a_dead_server_is_asked_once_more_elsewhere(death):
    dead, alive = Server("dead", death), Server("alive")
    pool = Pool(dead, alive)
    output = pool.generate()
    assert output.token_ids == [1, 2]
    assert pool.balancer.get_all_servers() == ["alive"]
    assert pool.client.retried == 1
    assert [len(dead.asked), len(alive.asked)] == [1, 1]
    assert alive.asked[0]["sampling_params"] == dead.asked[0]["sampling_params"] == PARAMS
    assert alive.asked[0]["prompt_ids"] == [1]


def test_two_dead_servers_fail_the_session():
    pool = Pool(Server("one", ActorDiedError()), Server("two", ActorDiedError()), Server("three"))
    with pytest.raises(SessionFailed) as failed:
        pool.generate()
    assert failed.value.reason == "server"
    assert pool.balancer.get_all_servers() == ["three"]
    assert pool.servers[2].asked == []  # once, not for ever
    assert pool.client.retried == 1


def test_no_server_left_fails_the_session():
    pool = Pool(Server("only", ActorDiedError()))
    with pytest.raises(SessionFailed, match="no LLM server is left") as failed:
        pool.generate()
    assert failed.value.reason == "server"


@pytest.mark.parametrize("cause", [ValueError("prompt too long"), EngineGenerateError()])
def test_a_wrong_request_is_neither_repeated_nor_the_servers_fault(cause):
    pool = Pool(Server("one", from_server(cause)), Server("two"))
    with pytest.raises(RayTaskError):
        pool.generate()
    assert pool.balancer.get_all_servers() == ["one", "two"]
    assert pool.servers[1].asked == []
    assert pool.client.retried == 0


def test_a_healthy_server_is_asked_once():
    pool = Pool(Server("one"), Server("two"))
    pool.generate()
    assert [len(s.asked) for s in pool.servers] == [1, 0]
    assert pool.client.retried == 0


def test_an_aborted_request_is_asked_once_more():
    pool = Pool(Server("one", stop_reason="aborted"))
    with pytest.raises(SessionFailed, match="aborted"):
        pool.generate()
    assert len(pool.servers[0].asked) == 2
    assert pool.balancer.get_all_servers() == ["one"]


@pytest.mark.parametrize("servers", [[Server("a")], [Server("a", ActorDiedError()), Server("b")]])
def test_the_callers_parameters_are_never_changed(servers):
    params = dict(PARAMS)
    Pool(*servers).generate(params)
    assert params == PARAMS


def test_a_dead_balancer_is_not_taken_for_a_dead_server():
    class Balancer:
        def acquire_server(self, **_):
            raise ActorDiedError()

        def require_acquire_fields(self):
            return []

        require_release_fields = require_acquire_fields

        def remove_servers(self, server_ids):
            raise AssertionError(f"asked to remove {server_ids}")

    client = RetryingClient(CONFIG, Handle(Balancer()))
    with pytest.raises(ActorDiedError):
        asyncio.run(client.generate("r", prompt_ids=[1], sampling_params=PARAMS))


def test_servers_are_released_and_nothing_is_kept():
    pool = Pool(Server("one"))
    pool.generate()
    assert pool.balancer.get_inflight_count("one") == 0
    assert pool.client._asked == {}


def test_survives_pickling():
    client = pickle.loads(pickle.dumps(RetryingClient(CONFIG, None)))
    assert client.retried == 0
    assert client.config == CONFIG


def test_a_subclass_made_by_ray_is_seen_through():
    """Ray raises an error that is both a RayTaskError and the cause's own type."""
    error = from_server(EngineDeadError("gone")).as_instanceof_cause()
    assert isinstance(error, EngineDeadError)
    assert is_dead(error)
    assert not is_dead(from_server(ValueError("no")).as_instanceof_cause())


# -- several models ----------------------------------------------------------------------------------------------------


def other_config(name):
    return OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"model": {"path": name}}})


def test_a_teams_clients_lead_each_to_its_own_servers():
    pools = {"a": Pool(Server("of a")), "b": Pool(Server("of b"))}
    team = TeamClient({model_id: pool.client for model_id, pool in pools.items()})

    async def ask(model_id):
        await team.clients[model_id].generate("r", prompt_ids=[1], sampling_params=PARAMS)
        await asyncio.sleep(0)

    asyncio.run(ask("b"))
    assert list(team.clients) == ["a", "b"]
    assert [len(pool.servers[0].asked) for pool in pools.values()] == [0, 1]


def test_a_teams_client_answers_nothing_itself():
    """A stock agent loop doesn't say which model it wants; it must not get one of them by chance."""
    assert not hasattr(TeamClient({"a": RetryingClient(CONFIG, None)}), "generate")


def test_retried_calls_are_summed_over_the_models_and_reset_in_all():
    pools = [Pool(Server("dead", ActorDiedError()), Server("alive")), Pool(Server("one")), Pool(Server("two"))]
    team = TeamClient({str(i): pool.client for i, pool in enumerate(pools)})
    pools[0].generate()
    pools[1].generate()
    pools[2].client.retried = 2
    assert team.retried == 3
    team.retried = 0
    assert [client.retried for client in team.clients.values()] == [0, 0, 0]
    assert team.retried == 0


def test_a_teams_client_survives_pickling():
    team = TeamClient({m: RetryingClient(other_config(m), None) for m in ("a", "b")})
    team.clients["a"].retried = 2
    again = pickle.loads(pickle.dumps(team))
    assert list(again.clients) == ["a", "b"]
    assert [c.config.actor_rollout_ref.model.path for c in again.clients.values()] == ["a", "b"]
    assert again.retried == 2
