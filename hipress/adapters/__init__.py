"""Where gradients come from: DDP's communication hook."""
