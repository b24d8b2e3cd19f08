// A worker whose timer keeps its pace in a hidden tab, where a page's own timers are slowed to one a second.
// Post a period in ms to start or change the pace, 0 to stop.

let timer = 0;

onmessage = ({ data: periodMs }) => {
  clearInterval(timer);
  if (periodMs > 0) timer = setInterval(() => postMessage(null), periodMs);
};
