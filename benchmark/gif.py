"""Make a small GIF of a video that an evaluation recorded.

    python ppo_continuous.py --compile --seed 2
    python ppo_continuous.py --evaluate runs/NAME --capture-video --eval-episodes 1 \
        --env-kwargs '{"camera_name": "track", "width": 360, "height": 240}'
    python benchmark/gif.py runs/NAME/videos-*/*.mp4 benchmark/results/cheetah.gif --seconds 3

lander.gif: `ppo.py --env-id LunarLander-v3 --total-timesteps 500000 --compile --seed 2`, 6 seconds;
humanoid.gif: `ppo_continuous.py --env-id Humanoid-v5 --compile --eval-interval 244 --seed 35`, 3.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro
from moviepy import VideoFileClip


@dataclass
class Args:
    """Make a GIF of a video."""

    video: tyro.conf.Positional[Path]
    gif: tyro.conf.Positional[Path]
    seconds: float = 5.0  # from the video's start
    width: int = 240  # pixels
    fps: int = 10  # frames a second


if __name__ == "__main__":
    args = tyro.cli(Args)
    clip = VideoFileClip(str(args.video))
    clip = clip.subclipped(0, min(args.seconds, clip.duration)).resized(width=args.width)
    clip.write_gif(str(args.gif), fps=args.fps, logger=None)
