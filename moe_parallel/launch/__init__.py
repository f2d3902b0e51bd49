"""How the ranks of a job are started: by this program's own launcher, by torchrun or by srun."""
