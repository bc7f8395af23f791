// The live connection: server-sent events while the page is visible, with a fallback when the server has no stream free.

const RETRY_MS = 4000;

export class LiveView {
  constructor(onView, onState) {
    this.onView = onView;
    this.onState = onState;
    this.source = null;
    this.timer = null;
    // A hidden tab gives its stream back: a browser opens only six to one host, over all its tabs.
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    window.addEventListener("pagehide", () => this.stop());
    window.addEventListener("pageshow", () => this.start());
    this.start();
  }

  start() {
    if (this.source || document.hidden) return;
    clearTimeout(this.timer);
    this.source = new EventSource("/events");
    this.source.addEventListener("open", () => this.onState("live"));
    this.source.addEventListener("view", (event) => this.take(event.data));
    this.source.addEventListener("error", () => this.failed());
  }

  stop() {
    clearTimeout(this.timer);
    if (this.source) this.source.close();
    this.source = null;
  }

  take(text) {
    try {
      this.onView(JSON.parse(text));
    } catch (error) {
      console.error(error);
    }
  }

  // The browser retries by itself unless the server answered with an error; then poll once and try again.
  failed() {
    this.onState("lost");
    if (!this.source || this.source.readyState !== EventSource.CLOSED) return;
    this.stop();
    this.timer = setTimeout(() => this.poll(), RETRY_MS);
  }

  async poll() {
    try {
      const answer = await fetch("/view.json");
      if (answer.ok) this.take(await answer.text());
    } catch {
      // the server is away; start() below keeps trying
    }
    this.start();
  }
}
