"""Load balancing: auxiliary losses, the loads of a step, and the balancing bias."""
