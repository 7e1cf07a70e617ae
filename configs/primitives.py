"""The primitives of HybridFlow (Sheng et al. 2025, table 4) as calls: python configs/primitives.py my-ppo.yaml"""

import sys

import flexrlhf


def train(run, batch):
    """Make a step of PPO on a batch of prompts; print the pretraining loss before it, and metrics of the updates."""
    run.generate(batch)  # generate_sequence
    run.computed_logprobs(batch)  # compute_log_prob
    run.values(batch)  # compute_values
    run.ref_logprobs(batch)  # compute_ref_log_prob
    run.scores(batch)  # compute_reward
    run.advantages(batch)  # compute_advantage
    if run.plan.spec.algorithm.ptx is not None:
        print(run.compute_loss("train_actor", batch, loss="ptx"))  # compute_loss
    print(run.train_actor(batch))  # update_actor
    print(run.train_critic(batch))  # update_critic


if __name__ == "__main__":
    with flexrlhf.Session(sys.argv[1]) as session:
        for each in session.prompts():
            train(session, each)
