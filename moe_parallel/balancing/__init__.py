"""How the load is spread over the experts: losses on routing, the loads of a step, and a bias."""
