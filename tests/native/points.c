/* What a test build has behind CRASH_POINT: tests/faults/points.py arms points, as it does for those in Python. */

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "protocol/words.h"

enum { KILL = 1, STOP, EXIT };

static struct {
    char name[64];
    int action;
    long left; /* so many times more that the process comes by */
} armed[16];
static int count;

int crash_arm(const char *name, int action, long nth) {
    if (count == sizeof armed / sizeof *armed || strlen(name) >= sizeof armed->name) return 0;
    strcpy(armed[count].name, name);
    armed[count].action = action;
    armed[count++].left = nth;
    return 1;
}

void crash_point(const char *name) {
    for (int i = 0; i < count; i++) {
        if (strcmp(armed[i].name, name) || --armed[i].left) continue;
        if (armed[i].action == EXIT) _exit(3);
        kill(getpid(), armed[i].action == KILL ? SIGKILL : SIGSTOP);
    }
}
