"""One page of HTML about runs, studies and plans, which needs no network."""
