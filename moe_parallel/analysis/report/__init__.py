"""One page of HTML about runs and studies, which needs no network."""
