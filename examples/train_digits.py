"""Teach a network to read handwritten digits on two hosts, with two processes each, from a laptop.

The hosts are started here, or are those of the cluster behind LOOM_URL. On the way the learning rate is lowered,
a process is lost, and training goes on from a checkpoint. The laptop needs neither torch nor scikit-learn.
"""

import math
import os
import pickle
import signal
import socket

import loom
from loom import Actor, current_rank, current_size, endpoint


class Trainer(Actor):
    """One process of the training: a replica of the network, and a share of the digits to learn from."""

    @endpoint
    def open_store(self):
        """On rank 0 only: open the store where the processes find each other, on a free port."""
        from torch.distributed import TCPStore  # imported where it runs

        sock = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))  # not on every address
        address = sock.getsockname()
        self.store = TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
        return address

    @endpoint
    def setup(self, address):
        """On every rank: join the others, load the digits, build the network."""
        import torch
        from sklearn.datasets import load_digits
        from torch import distributed, nn

        torch.set_num_threads(1)
        torch.manual_seed(0)
        rank, world_size = current_rank().rank, math.prod(current_size().values())
        store = self.store if rank == 0 else distributed.TCPStore(*address)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        images = images.float() / 16
        order = torch.randperm(len(images))
        test, mine = order[:357], order[357:][rank::world_size]  # 1,440 to learn from, in equal shares
        self.test_images, self.test_labels = images[test], labels[test]
        self.batches = list(zip(images[mine].split(32), labels[mine].split(32), strict=True))

        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.model = nn.parallel.DistributedDataParallel(network)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @endpoint
    def train(self):
        """Go through this rank's digits once, in step with the other ranks; returns the last loss."""
        for images, labels in self.batches:
            loss = self.loss(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()  # here the ranks average their gradients
            self.optimizer.step()
        return loss.item()

    @endpoint
    def evaluate(self):
        return (self.model.module(self.test_images).argmax(dim=1) == self.test_labels).float().mean().item()

    @endpoint
    def set_learning_rate(self, learning_rate):
        self.optimizer.param_groups[0]["lr"] = learning_rate

    @endpoint
    def save(self, epoch):
        return pickle.dumps((epoch, self.model.state_dict(), self.optimizer.state_dict()))

    @endpoint
    def load(self, checkpoint):
        epoch, model, optimizer = pickle.loads(checkpoint)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return epoch

    @endpoint
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


def start(hosts):
    procs = hosts.spawn_procs(per_host={"gpus": 2}, name="trainers")
    trainers = procs.spawn("trainers", Trainer)
    trainers.setup.call(trainers.slice(hosts=0, gpus=0).open_store.call_one().get()).get()
    return procs, trainers


with loom.connect() if "LOOM_URL" in os.environ else loom.local(hosts=2) as job:
    procs, trainers = start(job.hosts)
    epoch, kill_after = 0, 23
    checkpoint = trainers.save.choose(epoch).get()
    while epoch < 30:
        try:
            losses = trainers.train.call().get().values()
        except (loom.SupervisionError, loom.ActorError) as error:
            print(f"\nWhat the laptop sees is a {type(error).__name__}:\n{error}\n")
            procs.stop().get()
            procs, trainers = start(job.hosts)
            epoch = trainers.load.call(checkpoint).get().item(hosts=0, gpus=0)
            continue
        epoch += 1
        accuracy = trainers.evaluate.choose().get()  # any one: they are all the same
        print(f"epoch {epoch:2}   loss {max(losses):.3f}   {accuracy:.1%} of the test digits read correctly")
        if epoch % 5 == 0:
            checkpoint = trainers.save.choose(epoch).get()
        if epoch == 15:
            trainers.set_learning_rate.call(0.02).get()
        if epoch == kill_after:
            kill_after = 0  # once is enough
            trainers.slice(hosts=1, gpus=1).die.broadcast()  # waits for no answer
raise SystemExit(0 if accuracy >= 0.95 else "the network reads less than 95 % of the digits")
