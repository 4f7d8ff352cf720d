/* A link that is throttled in software: LD_PRELOAD this, and SLOW_SOCKETS=BYTES is what a process
   sends by TCP in a second. A send returns when its bytes would have left. To NCCL each process
   is a host of its own, so that it takes sockets, which NCCL_P2P_DISABLE does not bring about
   between ranks that share a GPU.

       cc -shared -fPIC -O2 -o slow_sockets.so bench/slow_sockets.c -ldl -lpthread */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate = -1, free_at = 0;

__attribute__((constructor)) static void be_a_host(void) {
  char name[32];
  snprintf(name, sizeof name, "%d", (int)getpid());
  if (getenv("SLOW_SOCKETS")) setenv("NCCL_HOSTID", name, 1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int is_tcp(int fd) {
  struct sockaddr_storage name;
  socklen_t size = sizeof name;
  if (getsockname(fd, (struct sockaddr *)&name, &size)) return 0;
  return name.ss_family == AF_INET || name.ss_family == AF_INET6;
}

static ssize_t slowed(int fd, ssize_t sent) {
  if (sent <= 0) return sent;
  if (rate < 0) rate = getenv("SLOW_SOCKETS") ? atof(getenv("SLOW_SOCKETS")) : 0;
  if (rate == 0 || !is_tcp(fd)) return sent;
  pthread_mutex_lock(&lock);
  double begin = now();
  free_at = (free_at > begin ? free_at : begin) + sent / rate;
  double wait = free_at - begin;
  pthread_mutex_unlock(&lock);
  struct timespec pause = {(time_t)wait, (long)(1e9 * (wait - (time_t)wait))};
  nanosleep(&pause, NULL);
  return sent;
}

#define ORIGINAL(name) \
  static __typeof__(&name) real = NULL; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t send(int fd, const void *data, size_t size, int flags) {
  ORIGINAL(send);
  return slowed(fd, real(fd, data, size, flags));
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  ORIGINAL(sendmsg);
  return slowed(fd, real(fd, message, flags));
}

ssize_t write(int fd, const void *data, size_t size) {
  ORIGINAL(write);
  return slowed(fd, real(fd, data, size));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
  ORIGINAL(writev);
  return slowed(fd, real(fd, parts, count));
}
