"""The choice of the plan of each step: fixed, tried, by a policy, or by an optimizer's freeze."""
