"""The attack on whatever comes from strangers: seeded mutations, each in a process of its own, counted by outcome."""
