"""Control of plans: each step's plan, chosen by measured times, a policy or a freeze."""
