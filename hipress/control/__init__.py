"""Control of plans: which one each step goes by, from measured times, a policy or a freeze."""
