"""Three actors play CartPole and fill one replay buffer; a learner samples it by priorities, and publishes its policy.

    python examples/replay_cartpole.py [--until MEAN] [--plot FILE] [--root PATH]

A learner (double DQN) and three actors, each a process of its own, communicate only through three keys of a store:

    "replay"     a replay buffer: the actors add transitions, the learner samples them
    "policy"     the network's weights: the learner puts them again and again, actors take the newest for each episode
    "episodes"   a dataset with a row for each episode, which this process reads to see how they are doing

The rate limiter of the buffer lets each row be sampled eight times, so faster or slower machines learn in the same
way: the side that is too fast waits. One actor is killed during the run, and another replaces it: nobody notices. The
run ends when the last 20 episodes had a mean return of 450; 500 is the maximum. `pip install '.[demo]'` brings what
it needs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import memstore

BATCH, PART = 64, 32  # rows that are sampled at once; that are added at once
GAMMA, LOOKAHEAD = 0.99, 5  # the discount a step; steps of rewards that a row adds up
SAMPLES_PER_INSERT, MIN_ROWS, TOLERANCE = 8.0, 1_000, 20_000.0
EXPLORED, LEAST_CHANCE = 10_000, 0.02  # rows after which actions are random with this probability only
PUBLISHED, FADED = 25, 0.01  # updates between two puts; of the target network that each update replaces
UPDATES, LAST = 40_000, 20  # of the learner, at most; episodes that a mean is taken of
ROW = {
    "observation": ((4,), torch.float32),
    "action": ((), torch.int64),
    "reward": ((), torch.float32),  # of LOOKAHEAD steps, discounted
    "next": ((4,), torch.float32),  # the observation after them
    "discount": ((), torch.float32),  # of what comes after them; 0 where the pole fell
}
EPISODE = {
    "actor": ((), torch.int64),
    "return": ((), torch.float32),
    "length": ((), torch.int64),
    "rows": ((), torch.int64),  # how many all actors had added by then
    "version": ((), torch.int64),  # of the policy that it was played with
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


# --- an actor ---------------------------------------------------------------------------------------------------------


def act(root: str, number: int) -> None:
    """Plays one episode after another, for ever. It may be killed at any line, and owes nothing."""
    torch.set_num_threads(1)
    torch.manual_seed(number)
    store = memstore.open(root, "r+")
    buffer = memstore.ReplayBuffer(store, "replay")
    episodes = store.open_dataset("episodes")
    environment = gymnasium.make("CartPole-v1")
    environment.reset(seed=number)
    policy = network()
    while True:
        version = store.load_model("policy", policy)
        rows, total = play(environment, policy, chance=max(LEAST_CHANCE, 1 - buffer.cursor / EXPLORED))
        for part in rows.split(PART):  # parts of one size: of those that wait, the smallest would pass first
            buffer.extend(part, timeout=600)
        one = (number, total, len(rows), buffer.cursor, version)
        episodes.extend({name: torch.tensor([value]) for name, value in zip(EPISODE, one, strict=True)})


@torch.no_grad()
def play(environment: Any, policy: nn.Module, chance: float) -> tuple[TensorDict, float]:
    """An episode, with random actions of this probability: its transitions and its return."""
    seen, actions, rewards = [environment.reset()[0]], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        if torch.rand(()) < chance:
            actions.append(int(torch.randint(2, ())))
        else:
            actions.append(int(policy(torch.from_numpy(seen[-1])).argmax()))
        observation, reward, terminated, truncated, _ = environment.step(actions[-1])
        seen.append(observation)
        rewards.append(float(reward))
    observations = torch.stack([torch.from_numpy(one) for one in seen])
    return transitions(observations, torch.tensor(actions), torch.tensor(rewards), terminated), sum(rewards)


def transitions(observations: Tensor, actions: Tensor, rewards: Tensor, terminated: bool) -> TensorDict:
    """One row a step, with the rewards of the next steps added up."""
    starts = torch.arange(len(actions))
    ends = (starts + LOOKAHEAD).clamp(max=len(actions))
    discount = GAMMA ** (ends - starts).float()
    if terminated:
        discount[ends == len(actions)] = 0
    ahead = torch.cat([rewards, torch.zeros(LOOKAHEAD - 1)]).unfold(0, LOOKAHEAD, 1)
    row = {"observation": observations[:-1], "action": actions, "reward": ahead @ GAMMA ** torch.arange(LOOKAHEAD)}
    return TensorDict({**row, "next": observations[ends], "discount": discount}, [len(actions)])


# --- the learner ------------------------------------------------------------------------------------------------------


def learn(root: str) -> None:
    """Samples, makes a step, tells the buffer how wrong it was about each row; publishes now and then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = memstore.open(root, "r+")
    buffer = memstore.ReplayBuffer(store, "replay", sampler="prioritized", beta=0.5, seed=0)
    online, target = network(), network()
    store.load_model("policy", online)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    for update in range(1, UPDATES + 1):
        batch = buffer.sample(BATCH, timeout=600)
        error = errors(batch, online, target)
        optimizer.zero_grad()
        (batch["weight"] * error.square()).mean().backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        buffer.update_priority(batch["index"], error.detach().abs() + 0.01)
        with torch.no_grad():
            for kept, new in zip(target.parameters(), online.parameters(), strict=True):
                kept.lerp_(new, FADED)
        if update % PUBLISHED == 0:
            store.save_model("policy", online)


def errors(batch: Any, online: nn.Module, target: nn.Module) -> Tensor:
    """Of each row: its value by the network, less what it should be. Double DQN: one network chooses, one judges."""
    with torch.no_grad():
        chosen = online(batch["next"]).argmax(1, keepdim=True)
        value = batch["reward"] + batch["discount"] * target(batch["next"]).gather(1, chosen).squeeze(1)
    return online(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1) - value


# --- who starts them, kills one, and judges ---------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python examples/replay_cartpole.py")
    parser.add_argument("--until", type=float, default=450.0, metavar="MEAN", help="the return that is good enough")
    parser.add_argument("--kill-after", type=int, default=5_000, metavar="ROWS", help="when an actor is killed")
    parser.add_argument("--plot", metavar="FILE", help="draw the returns: .svg or .png (needs matplotlib)")
    parser.add_argument("--root", default="/dev/shm/memstore-cartpole", help="of the store, which begins anew")
    options = parser.parse_args()
    with memstore.open(options.root, "w") as store:  # "w": without what a run has left that was killed
        try:
            return run(store, options)
        except KeyboardInterrupt:
            return 130
        finally:
            memstore.destroy(options.root)


def run(store: memstore.Store, options: argparse.Namespace) -> int:
    limiter = memstore.RateLimiter(SAMPLES_PER_INSERT, MIN_ROWS, TOLERANCE)
    buffer = memstore.ReplayBuffer(store, "replay", ROW, capacity=50_000, sampler="prioritized", rate_limiter=limiter)
    episodes = store.create_dataset("episodes", EPISODE, capacity=100_000)
    store.save_model("policy", network())
    processes: dict[str, Any] = {}
    try:
        for number in (1, 2, 3):
            processes[f"actor {number}"] = start(act, store.root, number)
        processes["learner"] = start(learn, store.root)
        killed = watch(store.root, buffer, episodes, processes, options.until, options.kill_after)
    finally:
        for process in processes.values():
            process.kill()  # they wait for one another, or play on: nobody has to say goodbye
            process.join()
    if options.plot and len(episodes) >= LAST:
        draw(episodes[:], killed, options.plot)
    return verdict(store, buffer, episodes[:], options.until)


def start(target: Any, *arguments: Any) -> Any:
    """A process from a server that has imported what takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["memstore.store.opening", "tensordict", "gymnasium"])
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def watch(root: str, buffer: Any, episodes: Any, processes: dict[str, Any], until: float, kill_after: int) -> int:
    """Until they are good enough, or somebody has ended. Returns how many rows there were when an actor was killed."""
    began = said = time.monotonic()
    killed = 0
    while all(process.is_alive() for process in processes.values()):
        time.sleep(0.1)
        mean = mean_return(episodes[-LAST:])
        if killed and mean >= until:
            break
        if not killed and buffer.cursor >= kill_after:
            victim = processes.pop("actor 2")
            victim.kill()
            victim.join()
            killed = buffer.cursor
            print(f"        actor 2 (pid {victim.pid}) got SIGKILL; actor 4 takes its place", flush=True)
            processes["actor 4"] = start(act, root, 4)
        if time.monotonic() >= said + 5:
            said = time.monotonic()
            progress = f"{buffer.cursor:8,} rows {len(episodes):6,} episodes, return of the last {LAST}: {mean:3.0f}"
            print(f"{said - began:5.0f} s {progress}", flush=True)
    return killed


def mean_return(episodes: Any) -> float:
    """Of the last ones, if there are so many."""
    return episodes["return"].mean().item() if len(episodes) == LAST else 0.0


def verdict(store: memstore.Store, buffer: Any, episodes: Any, until: float) -> int:
    """0 if they learned, and no row of an episode is missing in the buffer, whoever was killed."""
    for number in episodes["actor"].unique().tolist():
        of = episodes[episodes["actor"] == number]
        versions, rows = len(of["version"].unique()), int(of["length"].sum())
        print(f"actor {number}: {len(of):5,} episodes, {rows:7,} rows, with {versions:4} versions of the policy")
    policy, environment = network(), gymnasium.make("CartPole-v1")
    version = store.load_model("policy", policy)
    alone = sum(play(environment, policy, chance=0.0)[1] for _ in range(LAST)) / LAST
    print(f"version {version} of the policy, with no random actions: {alone:.0f}")
    mean, played = mean_return(episodes[-LAST:]), int(episodes["length"].sum())
    print(f"the last {LAST} episodes: {mean:.0f}; {played:,} rows were played, {buffer.cursor:,} were added")
    return 0 if mean >= until and played <= buffer.cursor else 1


def draw(episodes: Any, killed: int, path: str) -> None:
    """Each episode's return, and the mean of the last ones, over the rows of all actors."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, faint, grid = "#1f2328", "#59636e", "#d3d9df"
    dots = {1: "#6e7a86", 2: "#b5564a", 3: "#5d8c3c", 4: "#8c61b2"}
    looks = {"font.size": 12, "text.color": ink, "axes.labelcolor": faint, "xtick.labelcolor": faint,
             "ytick.labelcolor": faint, "svg.fonttype": "none"}  # fmt: skip
    with matplotlib.rc_context(looks):
        figure = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = figure.subplots()
        for number in episodes["actor"].unique().tolist():
            of = episodes[episodes["actor"] == number]
            axes.scatter(of["rows"], of["return"], s=16, label=f"actor {number}", color=dots[number], linewidths=0)
        means = episodes["return"].unfold(0, LAST, 1).mean(1)
        axes.plot(episodes["rows"][LAST - 1 :], means, color="#1a69a8", linewidth=2.6)
        beside = {"va": "center", "annotation_clip": False, "textcoords": "offset points"}
        end = (episodes["rows"][-1].item(), means[-1].item())
        axes.annotate(f"mean of\nthe last {LAST}", end, xytext=(8, 0), weight="bold", **beside)
        if killed:
            axes.axvline(killed, color=dots[2], linestyle="--", linewidth=1.5)
            axes.annotate("actor 2 is killed,\nactor 4 replaces it", (killed, 70), xytext=(36, 0), **beside)
        axes.set_title("CartPole: return of each episode", loc="left", fontsize=14, weight="bold", pad=48)
        axes.text(0, 1.12, "Higher is better; 500 is the most.", transform=axes.transAxes, fontsize=11, color=faint)
        axes.set(xlabel="steps of the environment, of all actors", ylabel="return of an episode", ylim=(0, 520))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(True, axis="y", color=grid, linewidth=0.8)
        axes.tick_params(length=0)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.02, 0.99), markerscale=1.6,
                    handletextpad=0, columnspacing=1.2)  # fmt: skip
        figure.savefig(path, facecolor="white")


if __name__ == "__main__":
    sys.exit(main())
