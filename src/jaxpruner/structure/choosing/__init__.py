"""Which channels stay: scores, rankings, costs and budgets."""
